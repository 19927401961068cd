"""What a connection may cost before it has become a request: each hostile one ends, and its neighbours are answered."""

import asyncio
import gc
import socket
import struct
import weakref

import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.connections import CLOSING_REASONS, ConnectionLimits, Connections, Phase
from tests.unit.frontend_app import ColourPredictor, image_bytes
from tests.unit.http_port import Port, http_port, until

IMAGE = image_bytes("blue")
ASK = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: image/png\r\nContent-Length: %d\r\n\r\n"


async def assert_neighbour_is_answered(port: Port) -> None:
    neighbour = await port.open()
    await neighbour.say(ASK % len(IMAGE) + IMAGE)
    status, answer = await neighbour.answer()
    assert (status, answer["predictions"][0]["label"]) == (200, "blue")


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with http_port(idle_timeout_s=0.2) as port:
        silent, kept = await port.open(), await port.open()
        assert await kept.healthy()
        assert await silent.rest() == b""
        assert await kept.rest() == b""
        assert port.closed("idle") == 2
        await assert_neighbour_is_answered(port)


@pytest.mark.parametrize("start", [b"GET /healthz HTTP/1.1\r\nX-A: b", b"\r\n\r\n", b"GET /" + b"a" * 500])
async def test_a_head_that_does_not_end_gets_408(start: bytes) -> None:
    async with http_port(header_timeout_s=0.3) as port:
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


async def test_a_body_that_stalls_gets_408() -> None:
    async with http_port(stall_timeout_s=0.3) as port:
        slow = await port.open()
        await slow.say(ASK % len(IMAGE) + IMAGE[:10])
        status, answer = await slow.answer()
        assert (status, answer["reason"]) == (408, "body")
        assert await slow.rest() == b""
        assert port.predictor.request_ids == []
        await assert_neighbour_is_answered(port)


async def test_the_rest_of_a_refused_body_is_not_read_for_ever() -> None:
    async with http_port(stall_timeout_s=0.3) as port:
        client = await port.open()
        await client.say(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert (await client.answer())[0] == 404
        await client.rest()
        assert port.closed("draining") == 1


async def test_a_client_that_takes_nothing_of_its_answer_is_closed() -> None:
    async with http_port(app=Response(bytes(50_000_000)), stall_timeout_s=0.5) as port:
        greedy = await port.open()
        greedy.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await greedy.say(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: port.closed("stuck"))
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
async def test_a_head_that_is_too_large_gets_431(name: str) -> None:
    async with http_port() as port:
        client = await port.open()
        telling = asyncio.create_task(client.say(HEADS[name]))
        status, answer = await client.answer()
        assert (status, answer["reason"]) == (431, "head_too_large")
        assert "32768 bytes" in answer["error"]
        await asyncio.gather(telling, return_exceptions=True)
        await assert_neighbour_is_answered(port)


async def test_as_many_headers_as_are_allowed_are_taken() -> None:
    async with http_port(max_headers=20, max_header_bytes=2000) as port:
        client = await port.open()
        fill = b"".join(b"h%d: v\r\n" % number for number in range(19))
        await client.say(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + fill + b"\r\n")
        assert (await client.answer())[0] == 200
        await client.say(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 1900 + b"\r\n\r\n")
        assert (await client.answer())[0] == 200


MALFORMED = {
    "no HTTP": b"hello\r\n\r\n",
    "TLS": bytes.fromhex("16030100c8010000c40303"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "header without name": b"GET / HTTP/1.1\r\n: v\r\n\r\n",
    "space in name": b"GET / HTTP/1.1\r\na b: v\r\n\r\n",
    "zero in value": b"GET / HTTP/1.1\r\na: \x00\r\n\r\n",
    "length and chunks": b"POST / HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "negative length": b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "enormous length": b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    "wrong chunk": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "path not ASCII": "GET /ü HTTP/1.1\r\n\r\n".encode(),
    "no path": b"GET  HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_what_is_no_request_gets_400(name: str) -> None:
    async with http_port() as port:
        client = await port.open()
        await client.say(MALFORMED[name])
        status, answer = await client.answer()
        assert (status, answer["reason"]) == (400, "malformed") if name != "no path" else status in (400, 404)
        assert await client.rest() == b""
        await assert_neighbour_is_answered(port)


async def test_requests_that_are_piled_up_behind_one_that_is_answered_are_bounded() -> None:
    proceed = asyncio.Event()
    async with http_port(ColourPredictor(proceed=proceed)) as port:
        client = await port.open()
        await client.say(ASK % len(IMAGE) + IMAGE)
        await port.predictor.asked_times(1)
        piling = asyncio.create_task(client.say(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000))
        status, answer = await client.answer()
        await asyncio.gather(piling, return_exceptions=True)
        assert (status, answer["reason"]) == (429, "pipelined")
        proceed.set()
        await assert_neighbour_is_answered(port)


async def test_a_few_piled_up_requests_are_answered_in_order() -> None:
    async with http_port() as port:
        client = await port.open()
        await client.say(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /readyz HTTP/1.1\r\nHost: x\r\n\r\n" * 4)
        answers = [(await client.answer())[1] for _ in range(8)]
        assert ["alive" if "alive" in answer else "ready" for answer in answers] == ["alive", "ready"] * 4


@pytest.mark.parametrize("sent", [0, 20, len(IMAGE) + 100])
async def test_a_half_closed_connection_is_closed_at_once(sent: int) -> None:
    """Who sends no more has hung up: a client that died looks the same, and nobody computes for the dead."""
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


async def test_idle_connections_make_room_and_those_that_wait_for_an_answer_do_not() -> None:
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


async def test_one_more_is_told_so_when_all_wait_for_an_answer() -> None:
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


async def test_an_upgrade_is_answered_without_one_and_closed() -> None:
    async with http_port() as port:
        client = await port.open()
        await client.say(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
        assert (await client.answer())[0] == 200
        assert await client.rest() == b""


@pytest.mark.parametrize("cut", [10, 40, 600])
async def test_a_head_that_comes_in_two_reads_is_not_taken_for_a_large_one(cut: int) -> None:
    """What comes behind its end in the second read is body; what was parsed of it is not counted again."""
    async with http_port(app=Response(b"{}"), max_header_bytes=1000) as port:
        client = await port.open()
        head = b"POST / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 700 + b"\r\nContent-Length: 2000\r\n\r\n"
        await client.say(head[:cut])
        await asyncio.sleep(
            0.05
        )  # for a read of its own; were it not one, the test would only not see what it is about
        await client.say(head[cut:] + bytes(2000))
        assert (await client.answer())[0] == 200


async def test_too_many_headers_of_an_upgrade_get_431() -> None:
    async with http_port(max_headers=3) as port:
        client = await port.open()
        await client.say(b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: x\r\nA: a\r\nB: b\r\nC: c\r\n\r\n")
        status, answer = await client.answer()
        assert (status, answer["reason"]) == (431, "head_too_large")


async def test_every_request_of_a_connection_that_is_lost_is_told_so() -> None:
    """Not only the one that came last."""
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


async def test_a_connection_that_was_reset_is_forgotten_at_once() -> None:
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
async def test_an_answer_that_is_taken_slowly_is_taken_whole(after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.connections._CLOSE_S", 0.5)
    size = 40_000_000
    async with http_port(app=Response(bytes(size)), stall_timeout_s=0.5) as port:
        client = await port.open()
        await client.say(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: %s\r\n\r\n" % after.encode())
        async with asyncio.timeout(60):
            head = await client.reader.readuntil(b"\r\n\r\n")
            taken = 0
            while taken < size and (data := await client.reader.read(400_000)):
                taken += len(data)
                await asyncio.sleep(0.02)
        assert head.startswith(b"HTTP/1.1 200")
        assert taken == size


class Told:
    """A connection that only writes down why it was closed."""

    phase, since_s = Phase.IDLE, 0.0

    def __init__(self, connections: Connections) -> None:
        self.connections = connections
        self.reasons: list[str] = []

    def expire(self, reason: str) -> None:
        self.reasons.append(reason)
        self.connections.leave(self)


def test_who_has_waited_longest_goes_first_and_never_who_waits_for_us() -> None:
    connections = Connections(ConnectionLimits(max_connections=4))
    first, second, head, busy, late = (Told(connections) for _ in range(5))
    for at_s, connection in enumerate((first, second, head, busy)):
        assert connections.enter(connection, at_s)
    connections.move(head, Phase.HEAD, 4)
    connections.move(busy, Phase.ANSWERING, 5)
    connections.move(first, Phase.ANSWERING, 6)
    connections.move(first, Phase.IDLE, 6.5)  # it has been useful: the second one is idle for longer
    for victim in (second, first, late, head):
        newcomer = late if victim is second else Told(connections)
        assert connections.enter(newcomer, 8)
        assert victim.reasons == ["evicted"]
        if newcomer is not late:
            connections.move(newcomer, Phase.ANSWERING, 8)
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
def test_who_was_answered_just_now_stays_when_others_flood_in(
    answered_s: float, phase: Phase, silent_s: float, goes: str
) -> None:
    """Its next request may be there already, and nobody has read it yet. Who says one byte is no better than who says nothing."""
    connections = Connections(ConnectionLimits(max_connections=2))
    answered, silent = Told(connections), Told(connections)
    connections.enter(answered, 5)
    connections.move(answered, Phase.IDLE, answered_s)
    connections.enter(silent, silent_s)
    connections.move(silent, phase, silent_s)
    assert connections.enter(Told(connections), 8)
    assert (answered.reasons, silent.reasons) == ((["evicted"], []) if goes == "answered" else ([], ["evicted"]))


def test_sweep_closes_the_overdue_alone() -> None:
    connections = Connections(ConnectionLimits(idle_timeout_s=10, header_timeout_s=2))
    idle, head, busy = (Told(connections) for _ in range(3))
    for connection in (idle, head, busy):
        connections.enter(connection, 0)
    connections.move(head, Phase.HEAD, 1)
    connections.move(busy, Phase.ANSWERING, 1)
    connections.sweep(2.9)
    assert len(connections) == 3
    connections.sweep(3)
    assert (idle.reasons, head.reasons, busy.reasons) == ([], ["head"], [])
    connections.sweep(10_000)
    assert (idle.reasons, busy.reasons) == (["idle"], [])
    assert {"idle", "head"} <= set(CLOSING_REASONS)


def test_time_for_which_we_stood_still_is_held_against_nobody() -> None:
    connections = Connections(ConnectionLimits(header_timeout_s=2))
    head = Told(connections)
    connections.enter(head, 0)
    connections.move(head, Phase.HEAD, 1)
    connections.forgive(100)
    connections.sweep(102.9)
    assert head.reasons == []
    connections.sweep(103)
    assert head.reasons == ["head"]
