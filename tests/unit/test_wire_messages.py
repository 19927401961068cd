"""The header of a message: what is packed comes back, and nothing that contradicts itself is believed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wire import HEADER_BYTES, JoinOffer, JoinRequest, Kind, Message, StageOrder, WireError
from wire.message import Header, bytes_tensor

dtypes = st.sampled_from([torch.uint8, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64])
shapes = st.lists(st.integers(0, 5), max_size=5)


@given(st.sampled_from(Kind), st.integers(0, 2**64 - 1), dtypes, shapes, st.integers(0, 2**63))
def test_header_comes_back_as_it_was_packed(
    kind: Kind, batch: int, dtype: torch.dtype, shape: list[int], compute_ns: int
) -> None:
    payload = torch.zeros(shape, dtype=dtype)
    header = Header.parse(Message(kind, batch, payload, compute_ns, 7, 3, 2**32 - 1).header(), 1 << 30)
    assert (header.kind, header.batch, header.compute_ns, header.waited_ns) == (kind, batch, compute_ns, 7)
    assert (header.stage, header.version) == (3, 2**32 - 1)
    assert header.payload_bytes == payload.nbytes
    if payload.nbytes:
        assert (header.dtype, header.shape) == (dtype, tuple(shape))


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_header_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        Header.parse(bytes_tensor(data), 1 << 30)


@given(st.integers(4, HEADER_BYTES - 1), st.integers(1, 255))
def test_header_with_a_flipped_byte_promises_no_more_than_allowed(at: int, flip: int) -> None:
    data = Message(Kind.BATCH, 1, torch.zeros(2, 3)).header()
    data[at] ^= flip
    try:
        header = Header.parse(data, 1000)
    except WireError:
        return
    elements = 1
    for dim in header.shape:
        elements *= dim
    assert header.payload_bytes <= 1000
    assert header.payload_bytes in (0, elements * header.dtype.itemsize)


def test_payload_longer_than_allowed_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(WireError, match="at most 100"):
        Header.parse(Message(Kind.RESULT, 1, torch.zeros(100)).header(), 100)


def test_text_is_refused_when_the_payload_is_a_tensor() -> None:
    assert Message.of_text(Kind.FAILED, "grüße").text() == "grüße"
    with pytest.raises(WireError, match="expected text"):
        Message(Kind.FAILED, 0, torch.zeros(3)).text()


@pytest.mark.parametrize(
    "value",
    [
        JoinRequest("w", "cpu", "node-1", 12),
        JoinOffer("s0.r1", 3),
        JoinOffer("", 0, 1500),
        StageOrder("{}", 10, "3x224x224", 8, 2, 1),
        StageOrder("{}", 10, "3x224x224", 8, 2, 1, "bfloat16", "auto", 2000),
    ],
)
def test_joining_words_come_back_from_json(value: JoinRequest | JoinOffer | StageOrder) -> None:
    assert type(value).from_json(value.to_json()) == value


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"world": "a"}', '{"world": 1, "epoch": 2}', '{"world": "a", "epoch": true}']
)
def test_joining_words_are_refused_when_they_are_not_exactly_right(text: str) -> None:
    with pytest.raises(WireError):
        JoinOffer.from_json(text)


def test_order_gives_the_shape_of_a_row() -> None:
    assert StageOrder("{}", 10, "3x224x224", 8, 2, 1).row_shape == (3, 224, 224)
    with pytest.raises(WireError, match="not a shape"):
        assert StageOrder("{}", 10, "3xx", 8, 2, 1).row_shape
