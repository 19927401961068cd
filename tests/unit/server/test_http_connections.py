"""Limits of connections before a request is complete: each hostile connection is closed, and others are served."""

import asyncio
import gc
import socket
import struct
import time
import weakref

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from multiworld_serving.common.http.connection_table import CLOSING_REASONS, ConnectionLimits, ConnectionTable, Phase
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


async def test_connection_is_closed_when_it_sends_nothing() -> None:
    async with http_port(idle_timeout_s=0.6) as port:
        silent, kept = await port.open(), await port.open()
        assert await kept.healthy()
        assert await silent.rest() == b""
        assert await kept.rest() == b""
        assert port.closed("idle") == 2
        await assert_neighbour_is_answered(port)


@pytest.mark.parametrize("start", [b"GET /healthz HTTP/1.1\r\nX-A: b", b"\r\n\r\n", b"GET /" + b"a" * 500])
async def test_head_gets_408_when_it_does_not_end(start: bytes) -> None:
    async with http_port(header_timeout_s=0.6) as port:
        slow = await port.open()

        async def drip() -> None:
            await slow.say(start)
            while True:
                await asyncio.sleep(0.02)
                await slow.say(b"\r\n" if start.isspace() else b"a")

        dripping = asyncio.create_task(drip())
        status, answer = await slow.answer()
        dripping.cancel()
        assert (status, answer["reason"]) == (408, "head")
        assert port.closed("head") == 1
        await assert_neighbour_is_answered(port)


async def test_body_gets_408_when_it_stalls() -> None:
    async with http_port(stall_timeout_s=0.6) as port:
        slow = await port.open()
        await slow.say(ASK % len(IMAGE) + IMAGE[:10])
        status, answer = await slow.answer()
        assert (status, answer["reason"]) == (408, "body")
        assert await slow.rest() == b""
        assert port.predictor.request_ids == []
        await assert_neighbour_is_answered(port)


async def test_rest_of_a_rejected_body_is_read_for_a_limited_time() -> None:
    async with http_port(stall_timeout_s=0.6) as port:
        client = await port.open()
        await client.say(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert (await client.answer())[0] == 404
        await client.rest()
        assert port.closed("draining") == 1


async def test_connection_is_closed_when_the_client_does_not_read_its_response() -> None:
    async with http_port(app=Response(bytes(50_000_000)), stall_timeout_s=0.5) as port:
        greedy = await port.open()
        greedy.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await greedy.say(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: port.closed("write_blocked"))
        await port.until_open(0)


HEADS = {
    "many headers": b"GET /healthz HTTP/1.1\r\n" + b"".join(b"h%d: v\r\n" % n for n in range(101)) + b"\r\n",
    "long header": b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
    "long path": b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\n\r\n",
    "many names": b"GET /healthz HTTP/1.1\r\n" + b"x: \r\n" * 50_000 + b"\r\n",
    "endless header": b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 2**20,
    "endless name": b"GET /healthz HTTP/1.1\r\n" + b"a" * 2**20,
}


@pytest.mark.parametrize("name", HEADS)
async def test_head_gets_431_when_it_is_too_large(name: str) -> None:
    async with http_port() as port:
        client = await port.open()
        telling = asyncio.create_task(client.say(HEADS[name]))
        status, answer = await client.answer()
        assert (status, answer["reason"]) == (431, "head_too_large")
        assert "32768 bytes" in answer["error"]
        await asyncio.gather(telling, return_exceptions=True)
        await assert_neighbour_is_answered(port)


async def test_maximum_number_of_headers_is_accepted() -> None:
    async with http_port(max_headers=20, max_header_bytes=2000) as port:
        client = await port.open()
        fill = b"".join(b"h%d: v\r\n" % number for number in range(19))
        await client.say(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + fill + b"\r\n")
        assert (await client.answer())[0] == 200
        await client.say(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 1900 + b"\r\n\r\n")
        assert (await client.answer())[0] == 200


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
    "no host": get(b"Accept: */*"),
    "two hosts": get(b"Host: x", b"Host: x"),
    "two hosts of 1.0": get(b"Host: x", b"Host: y", version=b"1.0"),
    "list of hosts": get(b"Host: x, y"),
    "host with a path": get(b"Host: x/y"),
    "host with a user": get(b"Host: a@x"),
    "host with a wrong port": get(b"Host: x:http"),
    "host that is no address": get(b"Host: [::1"),
    "length and chunks": post(b"Content-Length: 3", b"Transfer-Encoding: chunked"),
    "chunks and length": post(b"Transfer-Encoding: chunked", b"Content-Length: 3"),
    "two lengths": post(b"Content-Length: 3", b"Content-Length: 4", body=b"abc"),
    "the same length twice": post(b"Content-Length: 3", b"Content-Length: 3", body=b"abc"),
    "list of lengths": post(b"Content-Length: 3, 3", body=b"abc"),
    "negative length": post(b"Content-Length: -1"),
    "length with a sign": post(b"Content-Length: +3", body=b"abc"),
    "empty length": post(b"Content-Length:"),
    "enormous length": post(b"Content-Length: 99999999999999999999999"),
    "chunks of 1.0": post(b"Transfer-Encoding: chunked", body=b"0\r\n\r\n", version=b"1.0"),
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
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_request_gets_400(name: str) -> None:
    async with http_port() as port:
        client = await port.open()
        await client.say(MALFORMED[name])
        status, answer = await client.answer()
        assert (status, answer["reason"]) == (400, "malformed")
        assert set(answer) == {"error", "reason", "request_id"}
        assert await client.rest() == b""
        assert port.closed("malformed") == 1
        await assert_neighbour_is_answered(port)


UNSUPPORTED = {
    "gzip in chunks": (post(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"), 501, "not_implemented"),
    "the same in two headers": (post(b"Transfer-Encoding: x", b"Transfer-Encoding: chunked"), 501, "not_implemented"),
    "CONNECT": (b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n", 501, "not_implemented"),
    "HTTP/2.0": (get(b"Host: x", version=b"2.0"), 505, "http_version_not_supported"),
    "HTTP/0.9": (b"GET /healthz\r\n\r\n", 505, "http_version_not_supported"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
async def test_unimplemented_feature_is_rejected(name: str) -> None:
    data, status, reason = UNSUPPORTED[name]
    async with http_port() as port:
        client = await port.open()
        await client.say(data)
        found, answer = await client.answer()
        assert (found, answer["reason"]) == (status, reason)
        assert await client.rest() == b""
        assert port.closed(reason) == 1
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


@pytest.mark.parametrize("method", [b"HEAD", b"GET"])
async def test_error_response_to_head_has_no_body(method: bytes) -> None:
    async with http_port() as port:
        client = await port.open()
        await client.say(method + b" /healthz HTTP/1.1\r\n\r\n")
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert (body == b"") == (method == b"HEAD")


BAD = {
    "malformed": (b"hello\r\n\r\n", 400, "malformed"),
    "bad head": (get(), 400, "malformed"),
    "bad chunk": (chunked(b"xyz\r\n"), 400, "malformed"),
    "bad chunk, late": (chunked(b"1\r\na\r\nxyz\r\n"), 400, "malformed"),
    "large head": (get(b"Host: x", b"X: " + b"a" * 40_000), 431, "head_too_large"),
    "endless head": (b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000, 431, "head_too_large"),
    "unknown coding": (post(b"Transfer-Encoding: gzip, chunked"), 501, "not_implemented"),
}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", BAD)
async def test_earlier_requests_get_responses_when_a_pipelined_one_is_invalid(name: str, together: bool) -> None:
    data, status, reason = BAD[name]
    proceed = asyncio.Event()
    async with http_port(ColourPredictor(proceed=proceed)) as port:
        client = await port.open()
        good = ASK % len(IMAGE) + IMAGE + get(b"Host: x")
        await client.say(good + data if together else good)
        await port.predictor.asked_times(1)
        if not together:
            await client.say(data)
        await client.say(get(b"Host: x"))  # nothing after the invalid one is read
        proceed.set()
        found, answer = await client.answer()
        assert (found, answer["predictions"][0]["label"]) == (200, "blue")
        assert await client.answer() == (200, {"alive": True})
        found, answer = await client.answer()
        assert (found, answer["reason"]) == (status, reason)
        assert await client.rest() == b""
        assert port.closed(reason) == 1
        assert port.predictor.cancelled == 0
        await until(lambda: port.metrics.registry.get_sample_value("multiworld_requests_in_flight") == 0)
        await assert_neighbour_is_answered(port)


async def test_request_completes_when_the_next_pipelined_body_stalls() -> None:
    """The time limit for that body starts when the client waits for no other response."""
    proceed = asyncio.Event()
    async with http_port(ColourPredictor(proceed=proceed), stall_timeout_s=0.6) as port:
        client = await port.open()
        await client.say(ASK % len(IMAGE) + IMAGE + ASK % len(IMAGE) + IMAGE[:10])
        await port.predictor.asked_times(1)
        (connection,) = port.server.server_state.connections
        assert connection.phase is Phase.PROCESSING  # type: ignore[union-attr]
        proceed.set()
        assert (await client.answer())[0] == 200
        status, answer = await client.answer()
        assert (status, answer["reason"]) == (408, "body")
        assert await client.rest() == b""


async def test_second_response_is_never_sent_when_the_rest_of_a_rejected_body_is_malformed() -> None:
    async with http_port() as port:
        client = await port.open()
        await client.say(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        assert (await client.answer())[0] == 404
        await client.say(b"xyz\r\n")
        assert await client.rest() == b""


async def test_pipelined_requests_are_limited() -> None:
    proceed = asyncio.Event()
    async with http_port(ColourPredictor(proceed=proceed)) as port:
        client = await port.open()
        await client.say(ASK % len(IMAGE) + IMAGE)
        await port.predictor.asked_times(1)
        piling = asyncio.create_task(client.say(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000))
        await until(piling.done)
        proceed.set()
        assert [(await client.answer())[0] for _ in range(17)] == [200] * 17
        status, answer = await client.answer()
        assert (status, answer["reason"]) == (429, "pipelined")
        assert await client.rest() == b""
        assert port.predictor.cancelled == 0
        await assert_neighbour_is_answered(port)


@pytest.mark.parametrize("trailing", [b"X: " + b"a" * 2**20, b"1;" + b"a" * 2**20])
async def test_chunk_extensions_and_trailers_are_limited(trailing: bytes) -> None:
    """The parser stores trailers and skips extensions; the application sees neither."""
    async with http_port() as port:
        client = await port.open()
        await client.say(chunked(b"1\r\na\r\n" + (b"0\r\n" if trailing.startswith(b"X") else b"")))
        telling = asyncio.create_task(client.say(trailing))
        await client.rest()
        await asyncio.gather(telling, return_exceptions=True)
        assert port.closed("head_too_large") == 1


async def test_trailer_does_not_become_a_header() -> None:
    proceed = asyncio.Event()
    seen: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        await proceed.wait()
        seen.extend(name for name, _ in scope["headers"])
        await Response(b"{}")(scope, receive, send)

    async with http_port(app=app) as port:
        client = await port.open()
        await client.say(chunked(b"1\r\na\r\n0\r\nAuthorization: Bearer x\r\n\r\n"))
        await until(lambda: port.server.server_state.tasks)
        proceed.set()
        assert (await client.answer())[0] == 200
        assert seen == [b"host", b"transfer-encoding"]


async def test_pipelined_requests_get_responses_in_order() -> None:
    async with http_port() as port:
        client = await port.open()
        await client.say(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /readyz HTTP/1.1\r\nHost: x\r\n\r\n" * 4)
        answers = [(await client.answer())[1] for _ in range(8)]
        assert ["alive" if "alive" in answer else "ready" for answer in answers] == ["alive", "ready"] * 4


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
        await until(lambda: port.metrics.registry.get_sample_value("multiworld_requests_in_flight") == 0)
        assert port.predictor.cancelled == (sent > len(IMAGE))


async def test_idle_connections_are_evicted_and_waiting_ones_are_not() -> None:
    proceed = asyncio.Event()
    async with http_port(ColourPredictor(proceed=proceed), max_connections=20) as port:
        busy = await port.open()
        await busy.say(ASK % len(IMAGE) + IMAGE)
        await port.predictor.asked_times(1)
        idle = [await port.open() for _ in range(100)]
        newest = idle[-1]
        assert await newest.healthy()
        assert len(port.server.connections) <= 20
        assert port.closed("evicted") >= 80
        assert await idle[0].rest() == b""
        proceed.set()
        assert (await busy.answer())[0] == 200
        await assert_neighbour_is_answered(port)


async def test_new_connection_gets_503_when_no_connection_can_be_evicted() -> None:
    proceed = asyncio.Event()
    async with http_port(ColourPredictor(proceed=proceed), max_connections=2) as port:
        busy = [await port.open() for _ in range(2)]
        for client in busy:
            await client.say(ASK % len(IMAGE) + IMAGE)
        await port.predictor.asked_times(2)
        for _ in range(3):
            status, answer = await (await port.open()).answer()
            assert (status, answer["reason"]) == (503, "full")
        proceed.set()
        assert [(await client.answer())[0] for client in busy] == [200, 200]


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.3, HTTP/2.0"])
@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("cut", [None, 50, -len(IMAGE) // 2])
async def test_upgrade_is_ignored_and_the_body_is_read_when_a_request_asks_for_it(
    protocol: bytes, framing: str, cut: int | None
) -> None:
    async with http_port() as port:
        client = await port.open()
        asks = b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + protocol, b"Content-Type: image/png"
        if framing == "length":
            whole = post(*asks, b"Content-Length: %d" % len(IMAGE), body=IMAGE)
        else:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(IMAGE), IMAGE)
            whole = post(*asks, b"Transfer-Encoding: chunked", body=body)
        for _ in range(2):
            for part in [whole] if cut is None else [whole[:cut], whole[cut:]]:
                await client.say(part)
                await asyncio.sleep(0.01)  # read separately; otherwise the test would cover less
        for _ in range(2):
            status, answer = await client.answer()
            assert (status, answer["predictions"][0]["label"]) == (200, "blue")
        assert await client.healthy()


@pytest.mark.parametrize("cut", [10, 40, 600])
async def test_head_received_in_two_reads_is_not_counted_twice(cut: int) -> None:
    """Bytes after the end of the headers in the second read belong to the body; parsed bytes are not counted again."""
    async with http_port(app=Response(b"{}"), max_header_bytes=1000) as port:
        client = await port.open()
        head = b"POST / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 700 + b"\r\nContent-Length: 2000\r\n\r\n"
        await client.say(head[:cut])
        await asyncio.sleep(0.05)  # read separately; otherwise the test would not cover its subject
        await client.say(head[cut:] + bytes(2000))
        assert (await client.answer())[0] == 200


async def test_too_many_headers_of_an_upgrade_get_431() -> None:
    async with http_port(max_headers=3) as port:
        client = await port.open()
        await client.say(b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\nA: a\r\nB: b\r\nC: c\r\n\r\n")
        status, answer = await client.answer()
        assert (status, answer["reason"]) == (431, "head_too_large")


async def test_every_pipelined_request_is_cancelled_when_the_connection_is_lost() -> None:
    """Not only the last one."""
    told: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        while (await receive())["type"] != "http.disconnect":
            pass
        told.append(scope["path"])

    async with http_port(app=app) as port:
        client = await port.open()
        await client.say(b"GET /first HTTP/1.1\r\nHost: x\r\n\r\nGET /second HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: len(port.server.server_state.tasks) == 1)
        await client.close()
        await until(lambda: told == ["/first"])


async def test_connection_leaves_the_table_when_it_is_reset() -> None:
    async with http_port() as port:
        client = await port.open()
        assert await client.healthy()
        (protocol,) = port.server.server_state.connections
        lost = weakref.ref(protocol)
        del protocol
        client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await client.close()
        await port.until_open(0)

        def forgotten() -> bool:
            gc.collect()
            return lost() is None

        await until(forgotten)


@pytest.mark.parametrize("after", ["close", "keep-alive"])
async def test_slowly_read_response_is_sent_completely(after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiworld_serving.common.http.connection_table._CLOSE_S", 1.0)
    size = 20_000_000
    async with http_port(app=Response(bytes(size)), stall_timeout_s=1.0) as port:
        client = await port.open()
        await client.say(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: %s\r\n\r\n" % after.encode())
        began_s = time.monotonic()
        async with asyncio.timeout(60):
            head = await client.reader.readuntil(b"\r\n\r\n")
            taken = 0
            while taken < size and (data := await client.reader.read(400_000)):
                taken += len(data)
                await asyncio.sleep(0.02)
        assert head.startswith(b"HTTP/1.1 200")
        assert taken == size
        assert time.monotonic() - began_s > 1.0, "shorter than the limits"


class Told:
    """A connection that only records why it was closed."""

    phase, since_s = Phase.IDLE, 0.0

    def __init__(self, connections: ConnectionTable) -> None:
        self.connections = connections
        self.reasons: list[str] = []

    def expire(self, reason: str) -> None:
        self.reasons.append(reason)
        self.connections.leave(self)


def test_longest_idle_connection_is_evicted_first_and_processing_ones_never() -> None:
    connections = ConnectionTable(ConnectionLimits(max_connections=4))
    first, second, head, busy, late = (Told(connections) for _ in range(5))
    for at_s, connection in enumerate((first, second, head, busy)):
        assert connections.enter(connection, at_s)
    connections.move(head, Phase.HEAD, 4)
    connections.move(busy, Phase.PROCESSING, 5)
    connections.move(first, Phase.PROCESSING, 6)
    connections.move(first, Phase.IDLE, 6.5)  # it was active: the second one is idle for longer
    for victim in (second, first, late, head):
        newcomer = late if victim is second else Told(connections)
        assert connections.enter(newcomer, 8)
        assert victim.reasons == ["evicted"]
        if newcomer is not late:
            connections.move(newcomer, Phase.PROCESSING, 8)
    assert not connections.enter(Told(connections), 9)
    assert not busy.reasons


@pytest.mark.parametrize(
    ("answered_s", "phase", "silent_s", "goes"),
    [
        (7.9, Phase.FRESH, 7.5, "silent"),
        (7.1, Phase.FRESH, 7.5, "silent"),
        (6.9, Phase.FRESH, 7.5, "answered"),
        (6.9, Phase.FRESH, 6.0, "silent"),
        (7.1, Phase.HEAD, 7.5, "silent"),
        (6.9, Phase.HEAD, 6.0, "answered"),
    ],
)
def test_recently_active_connection_stays_when_others_flood_the_table(
    answered_s: float, phase: Phase, silent_s: float, goes: str
) -> None:
    """Its next request may have arrived unread. A connection that sent one byte is treated like one that sent nothing."""
    connections = ConnectionTable(ConnectionLimits(max_connections=2))
    answered, silent = Told(connections), Told(connections)
    connections.enter(answered, 5)
    connections.move(answered, Phase.IDLE, answered_s)
    connections.enter(silent, silent_s)
    connections.move(silent, phase, silent_s)
    assert connections.enter(Told(connections), 8)
    assert (answered.reasons, silent.reasons) == ((["evicted"], []) if goes == "answered" else ([], ["evicted"]))


def test_sweep_closes_only_expired_connections() -> None:
    connections = ConnectionTable(ConnectionLimits(idle_timeout_s=10, header_timeout_s=2))
    idle, head, busy = (Told(connections) for _ in range(3))
    for connection in (idle, head, busy):
        connections.enter(connection, 0)
    connections.move(head, Phase.HEAD, 1)
    connections.move(busy, Phase.PROCESSING, 1)
    connections.sweep(2.9)
    assert len(connections) == 3
    connections.sweep(3)
    assert (idle.reasons, head.reasons, busy.reasons) == ([], ["head"], [])
    connections.sweep(10_000)
    assert (idle.reasons, busy.reasons) == (["idle"], [])
    assert {"idle", "head"} <= set(CLOSING_REASONS)


def test_deadlines_are_extended_when_the_process_was_blocked() -> None:
    connections = ConnectionTable(ConnectionLimits(header_timeout_s=2))
    head = Told(connections)
    connections.enter(head, 0)
    connections.move(head, Phase.HEAD, 1)
    connections.extend_deadlines(100)
    connections.sweep(102.9)
    assert head.reasons == []
    connections.sweep(103)
    assert head.reasons == ["head"]
