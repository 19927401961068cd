"""TLS handshakes in progress count as connections and are limited in number and time."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.certificates import Authority
from tests.unit.server.frontend_app import ColourPredictor, image_bytes
from tests.unit.server.http_port import Port, http_port
from tests.waiting import until

IMAGE = image_bytes("blue")
ASK = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n%b"


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS contexts of the service and its clients."""
    authority = Authority(tmp_path_factory.mktemp("tls"))
    return server_context(authority), ssl.create_default_context(cafile=str(authority.file))


def server_context(authority: Authority) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.sign("server"))
    return context


Scenario = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def on_loop(request: pytest.FixtureRequest) -> Scenario:
    """Runs a scenario on an event loop of this kind."""

    def run(scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(scenario)

    return run


async def answered(port: Port, context: ssl.SSLContext) -> None:
    client = await port.open(context)
    await client.say(ASK % (len(IMAGE), IMAGE))
    assert (await client.answer())[0] == 200
    assert await client.healthy()


def test_handshakes_are_counted_and_evicted_when_there_are_too_many(
    on_loop: Scenario, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    async def scenario() -> None:
        async with http_port(context=contexts[0], max_connections=10) as port:
            silent = [await port.open() for _ in range(10)]
            await port.until_open(10)
            await answered(port, contexts[1])
            more = [await port.open() for _ in range(30)]
            await until(lambda: port.closed("evicted") >= 31)
            assert len(port.server.connections) == 10
            for client in silent[:1] + more[:10]:
                assert await client.rest() == b"", "its descriptor is closed"
            await answered(port, contexts[1])

    on_loop(scenario())


def test_unfinished_handshake_is_closed(on_loop: Scenario, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def scenario() -> None:
        async with http_port(context=contexts[0], header_timeout_s=1.0) as port:
            silent, slow = await port.open(), await port.open()
            await slow.say(bytes.fromhex("16030100c8010000c4"))
            assert [await client.rest() for client in (silent, slow)] == [b"", b""]
            assert port.closed("handshake") == 2
            await port.until_open(0)
            await answered(port, contexts[1])

    on_loop(scenario())


def test_failed_handshake_is_removed(on_loop: Scenario, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def scenario() -> None:
        async with http_port(context=contexts[0]) as port:
            plain, gone = await port.open(), await port.open()
            await plain.say(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            await plain.rest()
            await gone.close()
            await port.until_open(0)
            await answered(port, contexts[1])

    on_loop(scenario())


def test_handshake_is_refused_when_all_connections_wait_for_a_response(
    on_loop: Scenario, contexts: tuple[ssl.SSLContext, ssl.SSLContext]
) -> None:
    async def scenario() -> None:
        proceed = asyncio.Event()
        async with http_port(ColourPredictor(proceed=proceed), context=contexts[0], max_connections=2) as port:
            busy = [await port.open(contexts[1]) for _ in range(2)]
            for client in busy:
                await client.say(ASK % (len(IMAGE), IMAGE))
            await port.predictor.asked_times(2)
            assert await (await port.open()).rest() == b""
            assert port.closed("full") == 1
            proceed.set()
            assert [(await client.answer())[0] for client in busy] == [200, 200]

    on_loop(scenario())


def test_server_stops_during_handshakes(on_loop: Scenario, contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    async def scenario() -> None:
        async with http_port(context=contexts[0]) as port:
            silent = await port.open()
            await port.until_open(1)
        assert len(port.server.connections) == 0
        assert await silent.rest() == b""

    on_loop(scenario())


def test_new_connections_get_the_replaced_certificate(
    on_loop: Scenario, contexts: tuple[ssl.SSLContext, ssl.SSLContext], tmp_path: Path
) -> None:
    async def scenario() -> None:
        other = Authority(tmp_path, "other")
        async with http_port(context=contexts[0]) as port:
            old = await port.open(contexts[1])
            port.server.reload_tls(server_context(other))
            await answered(port, ssl.create_default_context(cafile=str(other.file)))
            with pytest.raises(ssl.SSLError):
                await port.open(contexts[1])
            assert await old.healthy()

    on_loop(scenario())
