"""What the HTTP port does below the application: malformed requests, limits, and clients that go away."""

import asyncio

import pytest

from tests.unit.server.frontend_app import ColourPredictor, image_bytes
from tests.unit.server.http_port import Port, http_port
from tests.waiting import until

IMAGE = image_bytes("blue")
ASK = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n"


async def assert_neighbour_is_answered(port: Port) -> None:
    neighbour = await port.open()
    await neighbour.say(ASK % len(IMAGE) + IMAGE)
    status, answer = await neighbour.answer()
    assert (status, answer["predictions"][0]["label"]) == (200, "blue")


def get(*lines: bytes, version: bytes = b"1.1") -> bytes:
    return b"\r\n".join([b"GET /healthz HTTP/" + version, *lines, b"", b""])


def post(*lines: bytes, body: bytes = b"", version: bytes = b"1.1") -> bytes:
    return b"\r\n".join([b"POST /predict HTTP/" + version, b"Host: x", *lines, b"", b""]) + body


def chunked(body: bytes) -> bytes:
    return post(b"Transfer-Encoding: chunked", body=body)


MALFORMED = {
    "no HTTP": b"hello\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "path not ASCII": "GET /ü HTTP/1.1\r\n\r\n".encode(),
    "no path": b"GET  HTTP/1.1\r\n\r\n",
    "space in path": b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
    "bare line feeds": b"GET / HTTP/1.1\nHost: x\n\n",
    "header without name": get(b"Host: x", b": v"),
    "space in name": get(b"Host: x", b"a b: v"),
    "space before colon": get(b"Host : x"),
    "zero in value": get(b"Host: x", b"a: b\x00c"),
    "control character in value": get(b"Host: x", b"a: \x01"),
    "bare carriage return in value": get(b"Host: x", b"a: b\rc"),
    "folded value": get(b"Host: x", b"a: b", b" c"),
    "length and chunks": post(b"Content-Length: 3", b"Transfer-Encoding: chunked"),
    "chunks and length": post(b"Transfer-Encoding: chunked", b"Content-Length: 3"),
    "two lengths": post(b"Content-Length: 3", b"Content-Length: 4", body=b"abc"),
    "the same length twice": post(b"Content-Length: 3", b"Content-Length: 3", body=b"abc"),
    "list of lengths": post(b"Content-Length: 3, 3", body=b"abc"),
    "negative length": post(b"Content-Length: -1"),
    "length with a sign": post(b"Content-Length: +3", body=b"abc"),
    "empty length": post(b"Content-Length:"),
    "enormous length": post(b"Content-Length: 99999999999999999999999"),
    "gzip alone": post(b"Transfer-Encoding: gzip", body=b"abc"),
    "identity": post(b"Transfer-Encoding: identity", body=b"abc"),
    "nearly chunked": post(b"Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
    "chunked with a parameter": post(b"Transfer-Encoding: chunked;a=b", body=b"0\r\n\r\n"),
    "chunked twice": post(b"Transfer-Encoding: chunked, chunked", body=b"0\r\n\r\n"),
    "chunked before gzip": post(b"Transfer-Encoding: chunked, gzip", body=b"0\r\n\r\n"),
    "chunked before gzip in two headers": post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip"),
    "empty coding": post(b"Transfer-Encoding:"),
    "coding in a folded value": post(b"Transfer-Encoding:", b" chunked", body=b"0\r\n\r\n"),
    "wrong chunk": chunked(b"xyz\r\n"),
    "chunk without size": chunked(b"\r\n\r\n"),
    "chunk with a sign": chunked(b"-1\r\n\r\n"),
    "chunk with 0x": chunked(b"0x1\r\na\r\n0\r\n\r\n"),
    "chunk beyond 64 bits": chunked(b"fffffffffffffffff\r\na\r\n"),
    "chunk longer than its size": chunked(b"1\r\nabc\r\n0\r\n\r\n"),
    "chunk with a bare line feed": chunked(b"1\na\n0\n\n"),
    "extension with a bare line feed": chunked(b"1;a\nb\r\na\r\n0\r\n\r\n"),
    "CONNECT": b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_request_gets_400(name: str) -> None:
    async with http_port() as port:
        client = await port.open()
        await client.say(MALFORMED[name])
        assert (await client.rest()).startswith(b"HTTP/1.1 400 ")
        await assert_neighbour_is_answered(port)


UNUSUAL = {
    "host with a port": get(b"Host: localhost:8000"),
    "host is an address": get(b"Host: [::1]:80"),
    "empty host": get(b"Host:"),
    "no host in 1.0": get(version=b"1.0"),
    "chunked in capitals": get(b"Host: x", b"Transfer-Encoding: Chunked") + b"1;a=b\r\na\r\n0\r\nA: b\r\n\r\n",
    "thousands of zeros": get(b"Host: x", b"Content-Length: " + b"0" * 5000 + b"1") + b"a",
    "path with a host": b"GET http://x/healthz HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.parametrize("name", UNUSUAL)
async def test_unusual_valid_request_is_accepted(name: str) -> None:
    async with http_port() as port:
        client = await port.open()
        await client.say(UNUSUAL[name])
        assert await client.answer() == (200, {"alive": True})


async def test_connection_is_closed_when_it_is_idle() -> None:
    async with http_port(keep_alive_s=1) as port:
        client = await port.open()
        assert await client.healthy()
        assert await client.rest() == b""


async def test_body_gets_408_when_it_is_not_complete_by_the_deadline() -> None:
    async with http_port(timeout_s=0.5) as port:
        slow = await port.open()
        await slow.say(ASK % len(IMAGE) + IMAGE[:10])
        status, answer = await slow.answer()
        assert (status, answer["reason"]) == (408, "body_timeout")
        assert await slow.rest() == b""
        assert port.predictor.request_ids == []
        await assert_neighbour_is_answered(port)


async def test_requests_get_503_while_too_many_connections_are_open() -> None:
    async with http_port(max_connections=3) as port:
        clients = [await port.open() for _ in range(4)]
        await port.until_open(4)
        await clients[3].say(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await clients[3].rest()).startswith(b"HTTP/1.1 503 ")
        await port.until_open(3)
        assert await clients[0].healthy()


@pytest.mark.parametrize("sent", [0, 20, len(IMAGE) + 100])
async def test_half_closed_connection_is_closed_immediately(sent: int) -> None:
    """A half-closed connection looks like a dead client, for which nothing is computed."""
    async with http_port(ColourPredictor(proceed=asyncio.Event())) as port:
        client = await port.open()
        whole = ASK % len(IMAGE) + IMAGE
        await client.say(whole[:sent] if sent <= len(IMAGE) else whole)
        if sent > len(IMAGE):
            await port.predictor.asked_times(1)
        client.writer.write_eof()
        assert await client.rest() == b""
        await port.until_open(0)
        await until(lambda: port.metrics.derived.get_sample_value("multiworld_requests_in_flight") == 0)
        assert port.predictor.cancelled == (sent > len(IMAGE))


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with http_port() as port:
        client = await port.open()
        await client.say(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /readyz HTTP/1.1\r\nHost: x\r\n\r\n" * 4)
        answers = [(await client.answer())[1] for _ in range(8)]
        assert ["alive" if "alive" in answer else "ready" for answer in answers] == ["alive", "ready"] * 4
