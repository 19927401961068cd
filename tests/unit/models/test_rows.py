"""Rows of several tensors as one tensor."""

import pytest
import torch

from multiworld_serving.models.bundle.manifest import TensorSpec
from multiworld_serving.models.bundle.nodes import DTYPES
from multiworld_serving.models.bundle.rows import RowFormat
from multiworld_serving.models.errors import BundleError

TEXT = RowFormat(
    (
        TensorSpec("ids", "int64", ("batch", "tokens")),
        TensorSpec("mask", "bool", ("batch", "tokens")),
        TensorSpec("score", "bfloat16", ("batch",)),
    ),
    {"tokens": (1, 9)},
)


def _text(rows: int, tokens: int) -> list[torch.Tensor]:
    ids = torch.arange(rows * tokens).view(rows, tokens)
    return [ids, ids % 3 == 0, torch.randn(rows).bfloat16()]


def test_single_tensor_of_fixed_dimensions_travels_as_it_is() -> None:
    images = RowFormat((TensorSpec("images", "uint8", ("batch", 3, 8, 8)),))
    batch = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    assert images.is_plain
    assert images.row_shape == (3, 8, 8)
    assert images.pack([batch]) is batch
    assert images.unpack(batch) == (batch,)
    assert images.key(batch) == ""


@pytest.mark.parametrize(
    ("shape", "dtype"), [((), "float32"), ((3, 4, 8, 8), "float32"), ((9,), "bool"), ((9,), "int16"), ((9,), "int8")]
)
def test_single_tensor_is_packed_when_messages_cannot_be_like_it(shape: tuple[int, ...], dtype: str) -> None:
    rows = RowFormat((TensorSpec("values", dtype, ("batch", *shape)),))
    batch = torch.randn(2, *shape).to(DTYPES[dtype])
    packed = rows.pack([batch])
    assert rows.row_shape == tuple(packed.shape[1:])
    (unpacked,) = rows.unpack(packed)
    assert torch.equal(unpacked, batch)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 9), (3, 5)])
def test_packed_rows_are_unpacked_bit_for_bit(rows: int, tokens: int) -> None:
    tensors = _text(rows, tokens)
    packed = TEXT.pack(tensors)
    assert packed.dtype == torch.uint8
    assert packed.shape[1] <= TEXT.max_row_bytes
    assert TEXT.key(packed) == f"{tokens}x{tokens}"
    for found, expected in zip(TEXT.unpack(packed), tensors, strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_rows_of_several_requests_form_a_batch() -> None:
    first, second = _text(1, 4), _text(2, 4)
    together = TEXT.unpack(torch.cat((TEXT.pack(first), TEXT.pack(second))))
    assert all(
        torch.equal(got, torch.cat(both)) for got, both in zip(together, zip(first, second, strict=True), strict=True)
    )


def test_rows_of_other_lengths_cannot_be_in_one_batch() -> None:
    rows = TEXT.pack(_text(2, 4))
    rows[1, 0] = 5
    with pytest.raises(BundleError, match="different lengths"):
        TEXT.unpack(rows)


@pytest.mark.parametrize("length", [0, 10, -1, 1 << 40])
def test_lengths_out_of_range_are_refused(length: int) -> None:
    rows = TEXT.pack(_text(1, 4))
    rows[0, :16] = torch.tensor([length, length]).view(torch.uint8)
    with pytest.raises(BundleError, match="expected 1 to 9"):
        TEXT.unpack(rows)


@pytest.mark.parametrize("size", [0, 16, 1000])
def test_rows_of_wrong_size_are_refused(size: int) -> None:
    with pytest.raises(BundleError, match=r"expected|lengths|the dimension"):
        TEXT.unpack(torch.zeros(2, size, dtype=torch.uint8))


def test_other_tensors_are_refused_with_what_is_expected() -> None:
    ids, mask, score = _text(2, 4)
    for wrong in ([ids, mask], [ids.int(), mask, score], [ids, mask[:1], score], [ids, mask[:, :2], score]):
        with pytest.raises(BundleError, match="expected"):
            TEXT.pack(wrong)
    with pytest.raises(BundleError, match=r"expected uint8 \['batch', 2\]"):
        RowFormat((TensorSpec("a", "uint8", ("batch", 2)),)).unpack(torch.zeros(1, 3, dtype=torch.uint8))


def test_empty_tensors_and_computed_dimensions_travel() -> None:
    boxes = RowFormat(
        (TensorSpec("boxes", "float32", ("batch", None, 4)), TensorSpec("none", "float32", ("batch", 0))), {}
    )
    for count in (0, 3):
        tensors = [torch.randn(2, count, 4), torch.empty(2, 0)]
        found = boxes.unpack(boxes.pack(tensors))
        assert all(torch.equal(*each) for each in zip(found, tensors, strict=True))


@pytest.mark.parametrize("shape", [(2,), ("batch", "unknown"), ("batch", 1 << 31)])
def test_impossible_formats_are_refused(shape: tuple[str | int, ...]) -> None:
    with pytest.raises(BundleError, match="row"):
        RowFormat((TensorSpec("a", "uint8", shape),))
