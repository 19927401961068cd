"""Encoded numbers are decoded with a known error."""

import random

import pytest
import torch
from torch import Tensor

from multiworld.collectives.quantization import BLOCK, CASTS, UINT8, decode, encode, encoded_bytes

FORMATS = (*UINT8, *CASTS)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def decoded(values: Tensor, wire_format: str) -> Tensor:
    encoded = encode(values, wire_format)
    assert (encoded.dtype, encoded.numel()) == (torch.uint8, encoded_bytes(values.numel(), wire_format))
    result = decode(encoded, values.numel(), values.dtype, wire_format)
    assert result.dtype is (torch.float64 if values.dtype is torch.float64 else torch.float32)
    return result


def bound(values: Tensor, wire_format: str) -> Tensor:
    """The largest error of each element, computed from its block, with the rounding of the decoded value."""
    exact = values.double()
    if wire_format in CASTS:
        limits = torch.finfo(CASTS[wire_format])
        return exact.abs() * limits.eps / 2 + limits.smallest_normal * limits.eps
    if wire_format == "zero_point_scale":
        spans = [torch.cat((block, torch.zeros(1))) for block in torch.split(exact, BLOCK)]
    else:
        spans = list(torch.split(exact, BLOCK))
    rounding = torch.finfo(torch.float64 if values.dtype is torch.float64 else torch.float32)
    errors = [(span.max() - span.min()) / 510 + span.abs().max() * 8 * rounding.eps for span in spans]
    return torch.cat([error.expand(len(block)) for error, block in zip(errors, torch.split(exact, BLOCK), strict=True)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire_format", FORMATS)
def test_error_is_at_most_the_documented_one_when_values_are_random(wire_format: str, dtype: torch.dtype) -> None:
    chance = random.Random(f"{wire_format} {dtype}")
    limit = min(torch.finfo(dtype).max, torch.finfo(CASTS.get(wire_format, dtype)).max, 1e300)
    for seed in range(100):
        count = chance.choice((1, 2, 255, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7))
        values = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        scale, shift = (chance.choice((0.0, 1e-3, 1.0, 1e4, limit / 20)) for _ in range(2))
        values = (values.clamp(-9, 9) * scale + chance.choice((-1, 1)) * shift).to(dtype)
        assert (decoded(values, wire_format).double() - values.double()).abs().le(bound(values, wire_format)).all(), (
            seed
        )


@pytest.mark.parametrize("wire_format", FORMATS)
def test_error_has_the_bound_when_the_range_is_that_of_the_dtype(wire_format: str) -> None:
    limit = torch.finfo(torch.float16 if wire_format == "float16" else torch.float32).max * 0.99
    values = torch.linspace(-1, 1, BLOCK, dtype=torch.float64).mul(limit).float()
    assert (decoded(values, wire_format).double() - values.double()).abs().le(bound(values, wire_format)).all()


@pytest.mark.parametrize("value", [0.0, 3.3, -1e30, 1e-40])
def test_equal_elements_are_exact(value: float) -> None:
    for count in (0, 1, BLOCK, BLOCK + 5):
        values = torch.full((count,), value)
        assert torch.equal(decoded(values, "min_max"), values)


def test_zero_is_exact_when_the_format_has_a_zero_point() -> None:
    for seed in range(100):
        values = torch.randn(BLOCK + 9, generator=torch.Generator().manual_seed(seed)) + seed / 25 - 2
        values[::3] = 0
        assert (decoded(values, "zero_point_scale")[::3] == 0).all()


@pytest.mark.parametrize("ends", [(-127.5, 127.5), (-0.5, 254.5), (-1.5, 253.5), (-3.0, -1.0), (1.0, 3.0)])
def test_zero_point_between_two_steps_does_not_wrap_around(ends: tuple[float, float]) -> None:
    values = torch.linspace(*ends, 512)
    assert (decoded(values, "zero_point_scale") - values).abs().le(bound(values, "zero_point_scale")).all()


@pytest.mark.parametrize("wire_format", UINT8)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_only_its_block_becomes_nan_when_a_number_is_not_finite(wire_format: str, poison: float) -> None:
    values = torch.arange(3.0 * BLOCK)
    values[BLOCK + 3] = poison
    finite = decoded(values, wire_format).isfinite().view(3, BLOCK)
    assert finite.all(dim=1).tolist() == [True, False, True]
    assert not finite[1].any()


def test_range_that_float64_cannot_hold_becomes_nan() -> None:
    assert decoded(torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64), "min_max").isnan().all()


def test_numbers_that_are_not_finite_stay_when_they_are_cast() -> None:
    result = decoded(torch.tensor([torch.nan, torch.inf, -torch.inf, 3.4e38]), "bfloat16")
    assert result.isnan().tolist() == [True, False, False, False]
    assert result[1:].tolist() == [torch.inf, -torch.inf, torch.inf]
