"""Message headers: round trips, and rejection of inconsistent ones."""

import json
import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multiworld.transport.wire import encode_signature
from multiworld_serving.common.wire.join import JoinOffer
from multiworld_serving.common.wire.message import (
    _CODES,
    _LAYOUT,
    _MAGIC,
    HEADER_BYTES,
    Message,
    MessageKind,
    WireError,
)
from multiworld_serving.common.wire.work import WORKER_PROTOCOL, StageAssignment

dtypes = st.sampled_from([torch.uint8, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64])
shapes = st.lists(st.integers(0, 5), max_size=4)


def parsed(message: Message) -> Message:
    return Message.parse(message.header(), 0 if message.payload is None else message.payload.nbytes)


@given(st.sampled_from(MessageKind), st.integers(0, 2**64 - 1), dtypes, shapes)
def test_header_survives_a_round_trip(kind: MessageKind, number: int, dtype: torch.dtype, shape: list[int]) -> None:
    payload = torch.zeros(shape, dtype=dtype)
    header = parsed(Message(kind, number, payload))
    assert (header.kind, header.number) == (kind, number)
    assert (header.dtype, header.shape) == (dtype, tuple(shape))


def test_header_without_payload_differs_from_an_empty_tensor() -> None:
    assert parsed(Message(MessageKind.GONE)).shape is None
    assert parsed(Message(MessageKind.ROWS, 1, torch.zeros(0, dtype=torch.uint8))).shape == (0,)
    assert parsed(Message(MessageKind.ROWS, 1, torch.tensor(7, dtype=torch.uint8))).shape == ()


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), st.integers(0, 2**64 - 1))
def test_random_header_is_refused(data: bytes, size: int) -> None:
    try:
        header = Message.parse(data, size)
    except WireError:
        return
    assert size == (0 if header.shape is None else math.prod(header.shape) * header.dtype.itemsize)


@pytest.mark.parametrize("signature", ["uint8[64]", "float32[12]"])
def test_header_is_refused_when_it_is_the_signature_of_a_tensor(signature: str) -> None:
    with pytest.raises(WireError, match="not a message of this version"):
        Message.parse(encode_signature(signature), 64)


@pytest.mark.parametrize(
    ("size", "shape"),
    [(0, (8, 1000)), (4 * 8 * 1000 + 4, (8, 1000)), (2**64 - 4, (2**32 - 1,) * 4), (0, (2**31, 2**31, 2))],
    ids=["none of a shape", "too large", "overflow", "overflow to none"],
)
def test_header_is_refused_when_size_and_shape_disagree(size: int, shape: tuple[int, ...]) -> None:
    form = _CODES[torch.float32] << 4 | len(shape)
    header = _LAYOUT.pack(_MAGIC, MessageKind.ROWS, form, 1, *shape, *(0,) * (4 - len(shape)))
    with pytest.raises(WireError, match=f"{size} bytes are not torch.float32"):
        Message.parse(header, size)


@pytest.mark.parametrize(
    "payload",
    [None, torch.zeros(5, 10), torch.zeros(10, 4), torch.zeros(40), torch.zeros(4, 10, dtype=torch.int32)],
    ids=lambda payload: "none" if payload is None else f"{payload.dtype} {tuple(payload.shape)}",
)
def test_header_is_refused_when_its_samples_are_unexpected(payload: torch.Tensor | None) -> None:
    parsed(Message(MessageKind.ROWS, 1, torch.zeros(4, 10))).require_batch(torch.float32, (10,), 4, 4)
    with pytest.raises(WireError, match=r"ROWS: expected torch.float32, 4 rows of \(10,\), got"):
        parsed(Message(MessageKind.ROWS, 1, payload)).require_batch(torch.float32, (10,), 4, 4)


def test_header_is_refused_when_its_payload_is_unexpected() -> None:
    with pytest.raises(WireError, match="expected no payload"):
        parsed(Message(MessageKind.GONE, 0, torch.zeros(0))).require_no_payload()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"world": "a"}', '{"world": 1, "generation": 2}', '{"world": "a", "generation": true}']
)
def test_inexact_join_messages_are_refused(text: str) -> None:
    with pytest.raises(WireError):
        JoinOffer.from_json(text)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("weights_bytes", (0, 1 << 50)),
        ("max_batch_size", (0, 10**30)),
        ("window", (0, 10**9)),
        ("version", (-1, 1 << 32)),
    ],
)
def test_assignment_is_refused_when_a_number_is_out_of_bounds(field: str, values: tuple[int, int]) -> None:
    good = msgspec.to_builtins(StageAssignment("{}", 10, "0" * 64, 8, 2, 1))
    for value in values:
        with pytest.raises(msgspec.MsgspecError, match=field):
            WORKER_PROTOCOL.bodies.decode(json.dumps({**good, field: value}))
