"""Queries and replies before a world exists."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from multiworld import AskError, WorldManager, ask
from multiworld.membership import acceptor as acceptor_module


@pytest.fixture
async def host() -> AsyncIterator[WorldManager]:
    async with WorldManager(secret="right") as manager:
        yield manager


async def echo(question: str, host: str) -> bytes:
    return f"{question} from {host}".encode()


async def fail(question: str, host: str) -> bytes:
    raise LookupError("on purpose")


async def ponder(question: str, host: str) -> bytes:
    await asyncio.Event().wait()
    raise AssertionError


async def refuse(question: str, host: str) -> bytes:
    raise AskError("we are full\x1b" + "!" * 100_000)


async def test_query_gets_its_reply_with_the_right_secret(host: WorldManager) -> None:
    port = host.listen()
    host.answer("127.0.0.1", port, echo)
    answers = await asyncio.gather(*(ask("127.0.0.1", port, f"question {n}", secret=b"right") for n in range(50)))
    assert answers == [f"question {n} from 127.0.0.1".encode() for n in range(50)]


@pytest.mark.parametrize("handler", [None, fail, ponder], ids=["is missing", "raises", "is too slow"])
async def test_query_fails_when_the_handler(
    host: WorldManager,
    handler: Callable[[str, str], Coroutine[Any, Any, bytes]] | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(acceptor_module, "_ANSWER_S", 0.1 if handler is ponder else 3600)
    port = host.listen()
    if handler is not None:
        host.answer("127.0.0.1", port, handler)
    with pytest.raises(AskError, match="no answer to this question"):
        await ask("127.0.0.1", port, "?", secret=b"right", timeout_s=3600)
    assert ("on purpose" in caplog.text) == (handler is fail)


async def test_caller_gets_the_reason_when_the_handler_refuses(
    host: WorldManager, caplog: pytest.LogCaptureFixture
) -> None:
    port = host.listen()
    host.answer("127.0.0.1", port, refuse)
    with pytest.raises(AskError, match=r"we are full\\x1b!!!") as refusal:
        await ask("127.0.0.1", port, "?", secret=b"right")
    assert len(str(refusal.value)) < 3000
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("WARNING", None)]


async def test_query_times_out_when_the_handler_does_not_return(
    host: WorldManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor_module, "_ANSWER_S", 3600)
    port = host.listen()
    host.answer("127.0.0.1", port, ponder)
    with pytest.raises(AskError, match="did not answer within 1 s"):
        await ask("127.0.0.1", port, "?", secret=b"right", timeout_s=1)


@pytest.mark.parametrize(
    "greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\0\x01\x07", b""], ids=["http", "frame", "end"]
)
async def test_error_says_that_another_protocol_answered(greeting: bytes) -> None:
    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(AskError, match="cannot be queried"):
            await ask("127.0.0.1", port, "?")


async def test_secret_can_be_rotated_while_the_former_is_accepted(host: WorldManager) -> None:
    port = host.listen()
    host.answer("127.0.0.1", port, echo)
    host.set_accepted_secrets(b"new", b"right")
    for secret in (b"new", b"right"):
        assert await ask("127.0.0.1", port, "?", secret=secret) == b"? from 127.0.0.1"
    host.set_accepted_secrets(b"new")
    assert await ask("127.0.0.1", port, "?", secret=b"new") == b"? from 127.0.0.1"
    with pytest.raises(PermissionError):
        await ask("127.0.0.1", port, "?", secret=b"right")
    later = host.listen()
    with pytest.raises(PermissionError):
        await ask("127.0.0.1", later, "?", secret=b"right")
