"""What travels between leader and frontends: whole however it is cut, what it was before, and no nonsense."""

import asyncio
import socket
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from server.accounts import RequestOutcome
from server.errors import OverloadedError, RequestRefused
from server.frontends.frames import MAX_BYTES, Frame, FrameLink, Kind
from server.frontends.messages import (
    answer_facts,
    answer_of,
    answer_payload,
    image_of,
    image_payload,
    outcome_facts,
    outcome_of,
    refusal_facts,
    refusal_of,
)
from server.http_errors import STATUS_OF_REASON
from server.predictor import Answer
from server.v2.statistics import ImageTimes, InferenceTimes

SENT: list[tuple[Kind, int, dict[str, Any], bytes]] = [
    (Kind.HERE, 0, {"name": "ü" * 40}, b""),
    (Kind.PING, 0, {}, b""),
    (Kind.PREDICT, 2**63, {"deadline_s": 1.5}, bytes(range(256)) * 300),
    (Kind.CANCEL, 7, {}, b""),
    (Kind.RESPONSE, 8, {"more_body": True}, b"x"),
]


def on_the_wire() -> bytes:
    """The bytes of those frames, as the link sends them."""

    async def send() -> bytes:
        ours, theirs = socket.socketpair()
        link = FrameLink(lambda _: None, lambda: None)
        await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
        for kind, number, facts, payload in SENT:
            link.send(kind, number, facts, payload)
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
    link = FrameLink(frames.append, lambda: None)
    left = memoryview(wire)
    while left:
        room = link.get_buffer(-1)
        count = min(len(room), len(left), cuts.pop() if cuts else len(left))
        room[:count] = left[:count]
        left = left[count:]
        link.buffer_updated(count)
    return frames


@given(st.lists(st.integers(1, 40_000), max_size=60))
def test_frames_are_what_they_were_however_the_bytes_come(cuts: list[int]) -> None:
    found = [(frame.kind, frame.number, frame.facts, bytes(frame.payload)) for frame in receive(WIRE, cuts)]
    assert found == SENT


def test_frames_are_what_they_were_byte_by_byte() -> None:
    assert len(receive(WIRE, [1] * len(WIRE))) == len(SENT)


@pytest.mark.parametrize(
    "nonsense",
    [
        bytes([99]) + bytes(16),
        bytes([Kind.PING]) + bytes(8) + (MAX_BYTES + 1).to_bytes(4) + bytes(4),
        bytes([Kind.PING]) + bytes(8) + (2).to_bytes(4) + bytes(4) + b"{]",
    ],
    ids=["no such kind", "too long", "no JSON"],
)
async def test_nonsense_ends_the_connection(nonsense: bytes) -> None:
    ours, theirs = socket.socketpair()
    lost = asyncio.Event()
    link = FrameLink(lambda _: None, lost.set)
    await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
    with theirs:
        theirs.sendall(nonsense)
        async with asyncio.timeout(30):
            await lost.wait()
    link.send(Kind.PING)  # to nobody, which is no error


def test_answers_images_and_outcomes_are_what_they_were() -> None:
    answer = Answer(torch.rand(1000), "m", "v", 0.1, 0.2, 0.3, 2, ("s0.r1", "s1.r0"), 4, 3)
    again = answer_of(answer_facts(answer), memoryview(bytearray(answer_payload(answer))))
    assert torch.equal(again.probabilities, answer.probabilities)
    assert answer_facts(again) == answer_facts(answer)
    image = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
    assert torch.equal(image_of(memoryview(bytearray(image_payload(image))), 8), image)
    with pytest.raises(ValueError, match="191 bytes"):
        image_of(memoryview(bytearray(191)), 8)
    for times in (None, InferenceTimes((ImageTimes(0.1, 0.2, 0.3, 4),), 0.5, 0.6)):
        outcome = RequestOutcome("v", "predict", 200, "ok", 1.5, times)
        assert outcome_of(outcome_facts(outcome)) == outcome


def test_every_refusal_arrives_as_what_it_was() -> None:
    refusal = OverloadedError("full", retry_after_s=2.5)
    again = refusal_of(refusal_facts(refusal))
    assert isinstance(again, OverloadedError)
    assert (again.detail, again.retry_after_s) == ("full", 2.5)
    for reason in STATUS_OF_REASON.keys() - {"internal"}:
        found = refusal_of(refusal_facts(RequestRefused.for_reason(reason, "why")))
        assert isinstance(found, RequestRefused)
        assert found.reason == reason
    assert type(refusal_of(refusal_facts(None))) is RuntimeError, "a defect of ours is no refusal"
