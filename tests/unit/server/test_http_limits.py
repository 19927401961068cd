"""The limits of the HTTP port: clients that open too many connections, send too large heads, or do not read their responses."""

import asyncio
import socket
import ssl
from contextlib import suppress
from pathlib import Path

import pytest
from starlette.responses import Response

from multiworld_serving.common.http.connection import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED, HttpConnection
from tests.certificates import Authority
from tests.unit.server.frontend_app import ColourPredictor, image_bytes
from tests.unit.server.http_port import Client, Port, http_port
from tests.waiting import until

IMAGE = image_bytes("blue")
POST = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\n"
PREDICT = POST + b"Content-Length: %d\r\n\r\n" % len(IMAGE) + IMAGE
GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"


async def flood(port: Port, count: int) -> list[Client]:
    """Open connections that send nothing, one after the other. At most one of them is above a limit of four."""
    clients = []
    for _ in range(count):
        clients.append(await port.open())
        await until(lambda: port.server.connections <= 5)
    return clients


async def test_unused_connections_are_closed_for_new_ones() -> None:
    async with http_port(max_connections=4) as port:
        client = await port.open()
        assert await client.healthy()
        for idle in (await flood(port, 20))[:-4]:
            assert await idle.rest() == b""
        assert await client.healthy(), "connections that have been used are closed last"
        assert await (await port.open()).healthy()


async def test_connection_that_was_used_last_is_closed_last() -> None:
    async with http_port(max_connections=2) as port:
        first, second = await port.open(), await port.open()
        for client in (first, second, first):
            assert await client.healthy()
        third = await port.open()
        assert await second.rest() == b""
        assert await first.healthy()
        assert await third.healthy()


async def test_new_connection_gets_503_when_all_others_have_requests() -> None:
    async with http_port(ColourPredictor(proceed=asyncio.Event()), max_connections=4) as port:
        busy = [await port.open() for _ in range(4)]
        for client in busy:
            await client.say(PREDICT)
            await port.frontend.predictor.asked.acquire()
        await flood(port, 5)
        refused = await port.open()
        await refused.say(GET + b"\r\n")
        assert (await refused.rest()).startswith(b"HTTP/1.1 503 ")
        assert port.frontend.predictor.proceed is not None
        port.frontend.predictor.proceed.set()
        assert [(await client.answer())[0] for client in busy] == [200] * 4


async def test_connection_without_tls_handshake_is_closed_for_a_new_one(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "services")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.sign("server"))
    async with http_port(max_connections=4, context=context) as port:
        silent = await flood(port, 20)
        client = await port.open(ssl.create_default_context(cafile=str(authority.file)))
        assert await client.healthy()
        assert await silent[0].rest() == b""
        await flood(port, 20)
        assert await client.healthy()


ENDLESS = {
    "line": (GET + b"X: ", b"a" * 5000),
    "path": (b"GET /", b"a" * 5000),
    "headers": (GET, b"a: b\r\n" * 1000),
    "chunk extension": (POST + b"Transfer-Encoding: chunked\r\n\r\n1;", b"a" * 5000),
    "trailers": (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 1000),
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_endless_head_gets_431(kind: str) -> None:
    async with http_port() as port:
        client, other = await port.open(), await port.open()
        start, more = ENDLESS[kind]
        await client.say(start)
        with suppress(OSError):  # the port may close the connection meanwhile
            for _ in range(2 * MAX_HEAD_BYTES // 5000 + 1):
                await client.say(more)
        assert await other.healthy()
        assert (await client.rest()).startswith(b"HTTP/1.1 431 ")
        await port.until_open(1)


async def test_largest_head_is_accepted() -> None:
    async with http_port() as port:
        client = await port.open()
        fields = b"".join(b"a%d: b\r\n" % number for number in range(MAX_HEADERS - 10))
        head = GET + fields + b"X: "
        for _ in range(3):
            await client.say(head + b"x" * (MAX_HEAD_BYTES - len(head) - 5) + b"\r\n\r\n")
            assert (await client.answer())[0] == 200
        await client.say(PREDICT * 3)
        assert [(await client.answer())[0] for _ in range(3)] == [200] * 3


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (GET + b"X: " + b"a" * MAX_HEAD_BYTES * 2, 431),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
    ],
)
async def test_requests_before_a_malformed_one_are_answered_first(bad: bytes, status: int) -> None:
    async with http_port(ColourPredictor(proceed=asyncio.Event())) as port:
        client = await port.open()
        await client.say(PREDICT, PREDICT, bad)
        await port.frontend.predictor.asked.acquire()
        assert port.frontend.predictor.proceed is not None
        port.frontend.predictor.proceed.set()
        assert [(await client.answer())[0] for _ in range(2)] == [200, 200]
        assert (await client.rest()).startswith(b"HTTP/1.1 %d " % status)


async def test_pipelined_requests_are_bounded_when_the_client_sends_without_reading() -> None:
    async with http_port() as port:
        client, other = await port.open(), await port.open()
        await client.say((GET + b"\r\n") * (MAX_PIPELINED + 1))
        for _ in range(MAX_PIPELINED + 1):
            assert (await client.answer())[0] == 200
        sending = asyncio.create_task(client.say((GET + b"\r\n") * 10_000))
        assert await other.healthy()
        received = await client.rest()
        assert received.count(b"HTTP/1.1 200 ") < 10_000
        assert b"HTTP/1.1 429 " in received
        with suppress(OSError):
            await sending
        await port.until_open(1)


async def test_nothing_is_read_while_requests_wait_for_the_one_before_them() -> None:
    async with http_port(ColourPredictor(proceed=asyncio.Event())) as port:
        client = await port.open()
        await client.say(PREDICT + GET + b"\r\n")
        await port.frontend.predictor.asked.acquire()
        (connection,) = port.server.server_state.connections
        assert isinstance(connection, HttpConnection)
        await client.say(GET + b"\r\n")
        await asyncio.sleep(1)  # the frontend begins to watch whether the client disconnects
        assert len(connection.pipeline) == 1
        assert port.frontend.predictor.proceed is not None
        port.frontend.predictor.proceed.set()
        assert [(await client.answer())[0] for _ in range(3)] == [200] * 3


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
async def test_client_that_does_not_read_is_disconnected() -> None:
    async with http_port(app=Response(b"x" * 50_000_000)) as port:
        listening = port.server._sock
        assert listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 500)
        await (await port.open()).say(GET + b"\r\n", GET + b"\r\n")
        await port.until_open(1)
        await port.until_open(0)


async def test_client_that_does_not_read_is_disconnected_for_a_new_one() -> None:
    async with http_port(app=Response(b"x" * 50_000_000), max_connections=2) as port:
        unread = [await port.open() for _ in range(2)]
        for client in unread:
            await client.say(GET + b"\r\n")
        await until(lambda: all(each.flow.write_paused for each in port.server.server_state.connections))  # type: ignore[union-attr]
        await port.open()
        assert len(await unread[0].rest()) < 50_000_000
