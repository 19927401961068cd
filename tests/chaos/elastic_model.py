"""What the tensors of a torture test of elastic worlds hold, and what an all-reduce must make of them.

Without quantization they hold small whole numbers, of which all reductions are exact in every dtype and in every order: results are
compared bit by bit. Quantised results are compared within the error that quantization.py and
quantized.py of multiworld/elastic/allreduce state.
"""

import functools
import hashlib
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": operator.add,
    "AVG": operator.add,
    "PRODUCT": operator.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}
_ROUNDING = {torch.float32: 2.0**-20, torch.float64: 2.0**-49, torch.bfloat16: 2.0**-6}


def operand(key: str, member: int, index: int, dtype: str, count: int, op: str, quantization: str) -> Tensor:
    """[count]: the content of this member's tensor `index` of the call `key`."""
    digest = hashlib.blake2b(f"{key}/{member}/{index}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    wanted: torch.dtype = getattr(torch, dtype)
    if quantization:
        scale = math.pow(10.0, float(torch.randint(-3, 4, (1,), generator=generator)))
        return (torch.randn(count, generator=generator) * scale).to(wanted)
    if op == "PRODUCT":
        return torch.tensor([-2, -1, 1, 2])[torch.randint(0, 4, (count,), generator=generator)].to(wanted)
    return torch.randint(-8, 9, (count,), generator=generator).to(wanted)


def explains(
    result: Tensor, operands: Sequence[Tensor], op: str, quantization: str, ranges: Sequence[tuple[float, float]]
) -> bool:
    """Whether this is the result of reducing these operands.

    Args:
        ranges: for each contributor the smallest and largest number in what is quantized together with this tensor.
    """
    if quantization:
        return _within(result, operands, op, quantization, ranges)
    total = functools.reduce(_COMBINE[op], operands)
    if op == "AVG":
        total = total.div(len(operands), rounding_mode=None if total.is_floating_point() else "trunc")
    return torch.equal(result, total)


def sets_of_participants(members: Iterable[int], present: set[int], size: int) -> Iterable[tuple[int, ...]]:
    """All sets of this many members that include all of `present`, in the order of `members`."""
    ordered = list(members)
    for chosen in itertools.combinations([each for each in ordered if each not in present], size - len(present)):
        yield tuple(each for each in ordered if each in present or each in chosen)


def _within(
    result: Tensor, operands: Sequence[Tensor], op: str, quantization: str, ranges: Sequence[tuple[float, float]]
) -> bool:
    divisor = len(operands) if op == "AVG" else 1
    exact = functools.reduce(_COMBINE[op], [each.double() for each in operands]) / divisor
    errors = [_bound(low, high, quantization) for low, high in ranges]
    lows, highs = zip(*ranges, strict=True)
    if op in ("MIN", "MAX"):
        joint, low, high = max(errors), min(lows), max(highs)
    else:
        joint, low, high = (sum(each) / divisor for each in (errors, lows, highs))
    allowed = joint + _bound(low - joint, high + joint, quantization)
    allowed += (len(operands) + 2) * _ROUNDING[result.dtype] * sum(max(-low, high) for low, high in ranges)
    return bool(((result.double() - exact).abs() <= allowed).all())  # false for a NaN


def _bound(low: float, high: float, quantization: str) -> float:
    match quantization:
        case "min_max":
            return (high - low) / 510
        case "zero_point_scale":
            return (max(high, 0.0) - min(low, 0.0)) / 255
    return max(abs(low), abs(high)) / 256
