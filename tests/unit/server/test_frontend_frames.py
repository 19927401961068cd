"""Frames between leader and frontends: round trips, backpressure and invalid frames."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multiworld_serving.server.errors import OverloadedError, RequestRefused
from multiworld_serving.server.frontends.frames import MAX_BYTES, Frame, FrameConnection, FrameKind
from multiworld_serving.server.frontends.messages import (
    image_payload,
    outcome_fields,
    parse_image,
    parse_outcome,
    parse_prediction,
    parse_refusal,
    prediction_fields,
    prediction_payload,
    refusal_fields,
)
from multiworld_serving.server.http.errors import STATUS_OF_REASON
from multiworld_serving.server.observability.inference_statistics import ImageTimes, InferenceTimes
from multiworld_serving.server.observability.request_recorder import RequestOutcome
from multiworld_serving.server.predictor import Prediction

SENT: list[tuple[FrameKind, int, dict[str, Any], bytes]] = [
    (FrameKind.HELLO, 0, {"name": "ü" * 40}, b""),
    (FrameKind.PING, 0, {}, b""),
    (FrameKind.PREDICT, 2**63, {"deadline_s": 1.5}, bytes(range(256)) * 300),
    (FrameKind.CANCEL, 7, {}, b""),
    (FrameKind.RESPONSE, 8, {"more_body": True}, b"x"),
]


def on_the_wire() -> bytes:
    """The bytes of these frames as the link sends them."""

    async def send() -> bytes:
        ours, theirs = socket.socketpair()
        link = FrameConnection(lambda _: None, lambda: None)
        await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
        for kind, number, fields, payload in SENT:
            link.send(kind, number, fields, payload)
        loop, came = asyncio.get_running_loop(), bytearray()
        theirs.setblocking(False)
        with theirs:
            while not came.endswith(b"x"):
                came += await loop.sock_recv(theirs, 1 << 20)
            link.close()
        return bytes(came)

    return asyncio.run(send())


WIRE = on_the_wire()


def receive(wire: bytes, cuts: list[int]) -> list[Frame]:
    frames: list[Frame] = []
    link = FrameConnection(frames.append, lambda: None)
    left = memoryview(wire)
    while left:
        room = link.get_buffer(-1)
        count = min(len(room), len(left), cuts.pop() if cuts else len(left))
        room[:count] = left[:count]
        left = left[count:]
        link.buffer_updated(count)
    return frames


@given(st.lists(st.integers(1, 40_000), max_size=60))
def test_frames_round_trip_when_bytes_are_split_anywhere(cuts: list[int]) -> None:
    found = [(frame.kind, frame.number, frame.fields, bytes(frame.payload)) for frame in receive(WIRE, cuts)]
    assert found == SENT


def test_frames_round_trip_when_received_byte_by_byte() -> None:
    assert len(receive(WIRE, [1] * len(WIRE))) == len(SENT)


@pytest.mark.parametrize(
    "nonsense",
    [
        bytes([99]) + bytes(16),
        bytes([FrameKind.PING]) + bytes(8) + (MAX_BYTES + 1).to_bytes(4) + bytes(4),
        bytes([FrameKind.PING]) + bytes(8) + (2).to_bytes(4) + bytes(4) + b"{]",
        bytes([FrameKind.PING]) + bytes(8) + (30_000).to_bytes(4) + bytes(4) + b"[" * 30_000,
    ],
    ids=["no such kind", "too long", "no JSON", "nested"],
)
async def test_connection_closes_when_a_frame_is_invalid(nonsense: bytes, caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    lost = asyncio.Event()
    link = FrameConnection(lambda _: None, lost.set)
    await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
    with theirs:
        theirs.sendall(nonsense)
        async with asyncio.timeout(30):
            await lost.wait()
    link.send(FrameKind.PING)  # addressed to no request, which is not an error
    assert [(record.levelname, record.exc_info) for record in caplog.records] == [("WARNING", None)]


@asynccontextmanager
async def link_to_a_sleeper() -> AsyncIterator[tuple[FrameConnection, socket.socket, asyncio.Event]]:
    """A link, its other end which nothing reads, and an event that is set when the link is lost."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    lost = asyncio.Event()
    link = FrameConnection(lambda _: None, lost.set)
    await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
    with theirs:
        try:
            yield link, theirs, lost
        finally:
            link.close()


PIECE = bytes(2**20)


async def test_senders_wait_when_the_other_end_reads_nothing() -> None:
    sent = 0

    async def send_one() -> None:
        nonlocal sent
        await link.wait_writable()
        link.send(FrameKind.PREDICT, 1, payload=PIECE)
        sent += 1

    async with link_to_a_sleeper() as (link, theirs, _), asyncio.timeout(30):
        senders = asyncio.gather(*(send_one() for _ in range(32)))
        for _ in range(20):  # turns of the event loop: enough for everything that can be sent
            await asyncio.sleep(0)
        assert 0 < sent <= 12
        for _ in range(20):
            link.send(FrameKind.PING)  # small frames do not wait
        left = 32 * (len(PIECE) + 17) + 20 * 17
        while left:
            left -= len(await asyncio.get_running_loop().sock_recv(theirs, 1 << 20))
        await senders
    assert sent == 32


async def test_senders_continue_when_the_connection_closes() -> None:
    async with link_to_a_sleeper() as (link, _, lost), asyncio.timeout(30):
        for _ in range(8):
            link.send(FrameKind.PREDICT, 1, payload=PIECE)
        waiting = asyncio.create_task(link.wait_writable())
        await asyncio.sleep(0)
        assert not waiting.done()
        link.close()
        await waiting
        await lost.wait()


async def test_connection_closes_when_the_backlog_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiworld_serving.server.frontends.frames._MAX_BACKLOG_BYTES", 2**23)
    async with link_to_a_sleeper() as (link, _, lost), asyncio.timeout(30):
        while not lost.is_set():
            link.send(FrameKind.PREDICT, 1, payload=PIECE)
            await asyncio.sleep(0)


def test_predictions_images_and_outcomes_round_trip() -> None:
    answer = Prediction(torch.rand(1000), "m", "v", 0.1, 0.2, 0.3, 2, ("s0.r1", "s1.r0"), 4, 3)
    again = parse_prediction(prediction_fields(answer), memoryview(bytearray(prediction_payload(answer))))
    assert torch.equal(again.probabilities, answer.probabilities)
    assert prediction_fields(again) == prediction_fields(answer)
    image = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
    assert torch.equal(parse_image(memoryview(bytearray(image_payload(image))), 8), image)
    with pytest.raises(ValueError, match="191 bytes"):
        parse_image(memoryview(bytearray(191)), 8)
    for times in (None, InferenceTimes((ImageTimes(0.1, 0.2, 0.3, 4),), 0.5, 0.6)):
        outcome = RequestOutcome("v", "predict", 200, "ok", 1.5, times)
        assert parse_outcome(outcome_fields(outcome)) == outcome


def test_every_refusal_round_trips() -> None:
    refusal = OverloadedError("full", retry_after_s=2.5)
    again = parse_refusal(refusal_fields(refusal))
    assert isinstance(again, OverloadedError)
    assert (again.detail, again.retry_after_s) == ("full", 2.5)
    for reason in STATUS_OF_REASON.keys() - {"internal"}:
        found = parse_refusal(refusal_fields(RequestRefused.for_reason(reason, "why")))
        assert isinstance(found, RequestRefused)
        assert found.reason == reason
    assert type(parse_refusal(refusal_fields(None))) is RuntimeError, "an internal error is not a refusal"
