"""Messages between frontends and leaders: round trips, invalid messages, and links whose other end is slow, silent or gone."""

import asyncio
import gc
import struct
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import multiworld
from multiworld import World
from multiworld_serving.common.service.administration import RestartFailedError
from multiworld_serving.common.service.errors import STATUS_OF_REASON, OverloadedError, RequestRejected
from multiworld_serving.common.service.messages import (
    FRONTEND_PROTOCOL,
    MAX_BYTES,
    AdminOperation,
    Done,
    Predict,
    Rejection,
    Scrape,
    Step,
    parse_rows,
)
from multiworld_serving.common.service.predictor import Prediction, RestartStep
from multiworld_serving.common.wire import link
from multiworld_serving.common.wire.inputs import RowRef, Source
from multiworld_serving.common.wire.join import WORLD_BACKEND
from multiworld_serving.common.wire.link import Link, LinkLostError
from multiworld_serving.common.wire.protocol import Kind, Received, encode, rows_payload
from tests.integration.members import managers
from tests.unit.server.fake_leaders import leader_state
from tests.unit.server.text_model import TEXT
from tests.waiting import until

decode = FRONTEND_PROTOCOL.decode
HEAD = struct.Struct("!BQII7x")
PIECE = bytes(2**20)

bodies = st.builds(
    Predict,
    st.text(max_size=20),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    rows=st.integers(1, 64),
    tensor=st.none() | st.integers(0, 2**63 - 1),
    relay=st.booleans(),
)
sent_frames = st.tuples(st.just(Kind.MESSAGE), st.integers(0, 2**64 - 1), bodies, st.binary(max_size=200))
Sent = tuple[Kind, int, Predict, bytes]


def received(data: bytes | bytearray) -> list[tuple[Kind, int, Any, bytes]]:
    return [(each.kind, each.number, each.body, bytes(each.payload)) for each in decode(memoryview(bytearray(data)))]


@given(st.lists(sent_frames, max_size=5))
def test_frames_round_trip_when_they_travel_together(sent: list[Sent]) -> None:
    assert received(b"".join(encode(*frame) for frame in sent)) == sent


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_frames_or_an_error_that_ends_the_link(data: bytes) -> None:
    with suppress(ValueError):
        received(data)


def test_payload_is_aligned_and_writable_and_of_its_own() -> None:
    message = bytearray()
    for size in range(1, 20):
        message += encode(Kind.MESSAGE, size, Predict("b" * size, 1.0), bytes([size]) * size)
    for frame in decode(memoryview(message)):
        own, whole = (torch.frombuffer(data, dtype=torch.uint8).data_ptr() for data in (frame.payload, message))
        assert own % 64 == whole % 64
        frame.payload[0] = 255
    assert [bytes(frame.payload).count(255) for frame in decode(memoryview(message))] == [1] * 19


INVALID = {
    "no such type": HEAD.pack(Kind.MESSAGE, 0, 16, 0) + b'{"type":"Nope"} ',
    "ends in its header": HEAD.pack(Kind.MESSAGE, 0, 0, 0)[:-1],
    "longer than its message": HEAD.pack(Kind.MESSAGE, 0, 0, 1),
    "far too long": HEAD.pack(Kind.MESSAGE, 0, 2**32 - 1, 2**32 - 1),
    "no JSON": HEAD.pack(Kind.MESSAGE, 0, 2, 0) + b"{]",
    "no UTF-8": HEAD.pack(Kind.MESSAGE, 0, 4, 0) + b'"\xff"}',
    "nested": HEAD.pack(Kind.MESSAGE, 0, 30_000, 0) + b"[" * 30_000,
    "a valid one before": bytes(encode(Kind.MESSAGE, 0, Scrape())) + HEAD.pack(99, 0, 0, 0),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_frame_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        received(INVALID[name])


# -- links ---------------------------------------------------------------------------------------------------------------------


class Ends:
    """Both ends of a link between two managers, and what arrived at each.

    Attributes:
        receive: what the leader does with a message, instead of keeping it.
    """

    def __init__(self, worlds: list[World]) -> None:
        self.at_leader: list[Received] = []
        self.at_frontend: list[Received] = []
        self.receive: Callable[[Received], None] = self.at_leader.append
        self.leader = Link(worlds[0], 1, FRONTEND_PROTOCOL, self._at_leader, MAX_BYTES)
        self.frontend = Link(worlds[1], 0, FRONTEND_PROTOCOL, self.at_frontend.append, MAX_BYTES)
        self.runs: list[asyncio.Task[LinkLostError]] = []

    def _at_leader(self, message: Received) -> None:
        self.receive(message)

    def run(self, end: Link) -> asyncio.Task[LinkLostError]:
        self.runs.append(asyncio.create_task(end.run()))
        return self.runs[-1]


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    """A link over TCP. Neither end receives until it is told to run."""
    async with managers(2, secret="s", verify_collectives=False) as (first, second):
        port = first.listen("127.0.0.1", 0)
        joins = [
            manager.initialize_world("w", rank, 2, WORLD_BACKEND, addr="127.0.0.1", port=port)
            for rank, manager in enumerate((first, second))
        ]
        made = Ends(await asyncio.gather(*joins))
        yield made
        for run in made.runs:
            run.cancel()
        await asyncio.gather(*made.runs, return_exceptions=True)


async def test_calls_that_are_withdrawn_end_and_their_late_replies_are_dropped(ends: Ends) -> None:
    ends.run(ends.leader)
    ends.run(ends.frontend)
    cancelled = asyncio.Event()
    first = asyncio.create_task(ends.frontend.call(Scrape(), timeout_s=None))
    await until(lambda: len(ends.at_leader) == 1)
    ends.leader.expect_cancel(ends.at_leader[0].number, cancelled.set)
    ends.frontend.withdraw_calls("it is silent")
    with pytest.raises(LinkLostError, match="it is silent") as caught:
        await first
    assert not caught.value.failed
    await cancelled.wait()
    second = asyncio.create_task(ends.frontend.call(Scrape(), timeout_s=None))
    await until(lambda: len(ends.at_leader) == 2)
    ends.leader.reply(ends.at_leader[0].number, Step(RestartStep("w", "s0.r0", "restarting", 1, 2)))
    ends.leader.reply(ends.at_leader[1].number, Done())
    assert (await second).body == Done()


async def test_frames_of_a_busy_link_share_messages_in_order(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = 0
    start = World.start_send_message

    def counting(self: World, header: bytes, payload: torch.Tensor, dst: int) -> multiworld.Operation:
        nonlocal messages
        messages += 1
        return start(self, header, payload, dst)

    monkeypatch.setattr(World, "start_send_message", counting)
    ends.run(ends.leader)
    for number in range(100):
        ends.frontend.send(Predict(str(number), 1.0), bytes(number))
    await until(lambda: len(ends.at_leader) == 100)
    arrived = [(each.body.request_id, len(each.payload)) for each in ends.at_leader]
    assert arrived == [(str(number), number) for number in range(100)]
    assert 0 < messages <= 3


async def test_senders_wait_when_the_other_end_reads_nothing(ends: Ends) -> None:
    sent = 0

    async def send_one() -> None:
        nonlocal sent
        await ends.frontend.wait_writable()
        ends.frontend.reply(1, Predict("r", 1.0), PIECE, Kind.MESSAGE)
        sent += 1

    senders = asyncio.gather(*(send_one() for _ in range(40)))
    for _ in range(20):  # turns of the event loop
        await asyncio.sleep(0.005)
    assert 0 < sent <= 16
    for _ in range(20):
        ends.frontend.send(Scrape())  # small frames do not wait
    ends.run(ends.leader)
    await senders
    await until(lambda: len(ends.at_leader) == 60)
    assert sent == 40


async def test_link_fails_when_the_backlog_is_too_large(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_MAX_BACKLOG_BYTES", 2**24)
    running = ends.run(ends.frontend)
    for _ in range(40):
        ends.frontend.reply(1, Predict("r", 1.0), PIECE, Kind.MESSAGE)
    assert "did not read" in str(await running)


async def test_link_ends_when_a_frame_is_invalid(ends: Ends) -> None:
    running = ends.run(ends.leader)
    at_frontend = ends.run(ends.frontend)
    payload = torch.frombuffer(bytearray(INVALID["no such type"]), dtype=torch.uint8)
    await ends.frontend.world.start_send_message(b"", payload, 0)
    lost = await running
    assert lost.failed
    assert "invalid message" in str(lost)
    ends.leader.world.close()
    await at_frontend


async def test_call_gets_its_reply_or_an_exception_and_a_stream_its_steps(ends: Ends) -> None:
    works: list[asyncio.Future[Any]] = []

    async def result_of(work: asyncio.Future[Any]) -> Any:
        return await work

    def receive(received: Received) -> None:
        match received.body:
            case Scrape(others=False):
                ends.leader.reply(received.number, Done())
            case Scrape():
                works.append(asyncio.get_running_loop().create_future())
                ends.leader.handle(received.number, result_of(works[-1]))
            case AdminOperation():
                ends.leader.reply(received.number, Step(RestartStep("w", "s0.r0", "restarting", 1, 1)), kind=Kind.STEP)
                ends.leader.reply_error(received.number, RestartFailedError("stuck"))

    ends.receive = receive
    ends.run(ends.leader)
    running = ends.run(ends.frontend)
    assert isinstance((await ends.frontend.call(Scrape(), timeout_s=30)).body, Done)
    waiting = [asyncio.create_task(ends.frontend.call(Scrape(others=True), timeout_s=30)) for _ in range(5)]
    await until(lambda: len(works) == 5)
    waiting[0].cancel()
    await until(works[0].cancelled)
    works[1].set_exception(OverloadedError("full"))
    with pytest.raises(OverloadedError, match="full"):
        await waiting[1]
    works[2].set_exception(ZeroDivisionError("secret"))
    with pytest.raises(RuntimeError, match=r"the leader failed \(ZeroDivisionError\); see its log"):
        await waiting[2]
    works[3].set_result(Done())
    assert isinstance((await waiting[3]).body, Done)
    with pytest.raises(TimeoutError):
        await ends.frontend.call(Scrape(others=True), timeout_s=0.01)
    steps = ends.frontend.stream(AdminOperation("rolling-restart"))
    assert isinstance(await anext(steps), Step)
    with pytest.raises(RestartFailedError, match="stuck"):
        await anext(steps)
    ends.leader.fail("of this test")
    with pytest.raises(LinkLostError, match="of this test"):
        await waiting[4]
    await running
    await until(works[4].cancelled)
    assert not ends.frontend._replies
    with pytest.raises(LinkLostError, match="not connected"):
        await ends.frontend.call(Scrape(), timeout_s=30)


async def test_rejected_call_keeps_nothing_in_memory_when_its_exception_is_gone(ends: Ends) -> None:
    ends.receive = lambda message: ends.leader.reply_error(message.number, OverloadedError("full"))
    ends.run(ends.leader)
    ends.run(ends.frontend)

    async def rejected() -> weakref.ref[torch.Tensor]:
        rows = torch.zeros(1)
        alive = weakref.ref(rows)

        async def caller(rows: torch.Tensor) -> None:
            await ends.frontend.call(Predict("r", 1.0), rows_payload(rows), timeout_s=None)

        with pytest.raises(OverloadedError):
            await caller(rows)
        return alive

    gc.collect()
    gc.disable()  # a cycle of references would keep the input for long
    try:
        alive = await rejected()
        assert alive() is None
    finally:
        gc.enable()


# -- what frames say -----------------------------------------------------------------------------------------------------------


def round_trip(body: Any) -> Any:
    [received] = decode(memoryview(encode(Kind.MESSAGE, 1, body)))
    return received.body


def test_prediction_round_trips_without_its_rows_which_are_the_payload() -> None:
    kept = (Source("h:1/a", (RowRef(5, 1), RowRef(5, 2)), (1, 0)),)
    answer = Prediction(torch.rand(2, 1000), "m", "v", 0.1, 0.2, 0.3, 2, ("s0.r1", "s1.r0"), 4, 3, "digest", kept)
    found = round_trip(answer)
    assert not found.output.numel()
    assert msgspec.structs.replace(found, output=answer.output) == answer


def test_rows_of_several_tensors_round_trip() -> None:
    rows = TEXT.input_rows
    packed = rows.pack([torch.arange(6).view(2, 3), torch.tensor([[True, False, True]] * 2)])
    assert torch.equal(parse_rows(memoryview(bytearray(rows_payload(packed))), 2, rows), packed)
    for wrong in (b"", bytes(16), bytes(packed.nbytes), bytes(rows_payload(packed))[:-1]):
        with pytest.raises(ValueError, match=r"length|bytes|divisible"):
            parse_rows(memoryview(bytearray(wrong)), 2, rows)


@pytest.mark.parametrize(
    "wrong",
    [
        {"inputs": []},
        {"inputs": [{"name": "x", "dtype": "float31", "shape": ["batch"]}]},
        {"dimensions": {}},
    ],
)
def test_impossible_model_of_a_leader_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"row|dtype"):
        round_trip({**msgspec.to_builtins(leader_state("m")), "model": {**msgspec.to_builtins(TEXT), **wrong}})


def test_every_rejection_round_trips() -> None:
    rejection = OverloadedError("full", retry_after_s=2.5)
    again = round_trip(Rejection.of(rejection)).error()
    assert isinstance(again, OverloadedError)
    assert (again.detail, again.retry_after_s) == ("full", 2.5)
    for reason in STATUS_OF_REASON.keys() - {"internal"}:
        found = round_trip(Rejection.of(RequestRejected.for_reason(reason, "why"))).error()
        assert isinstance(found, RequestRejected)
        assert found.reason == reason
    assert type(Rejection.of(ValueError("secret")).error()) is RuntimeError, "a defect of ours is no rejection"
