"""Tensors whose contents follow from a key, in many memory layouts, and the expected results of operations.

Reductions use small integers, so that their results are exact in every dtype and in every order of the operands.
"""

import functools
import hashlib
import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

MOVED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int64, torch.int32, torch.int8, torch.uint8)
_COMPLEX = (torch.complex64, torch.complex128)
REDUCED: dict[str, tuple[torch.dtype, ...]] = {
    "SUM": (*_FLOATS, *_INTEGERS, *_COMPLEX),
    "AVG": (*_FLOATS, *_COMPLEX),
    "PRODUCT": (*_FLOATS, *_INTEGERS),
    "MIN": (*_FLOATS, *_INTEGERS, torch.bool),
    "MAX": (*_FLOATS, *_INTEGERS, torch.bool),
    "BAND": (*_INTEGERS, torch.bool),
    "BOR": (*_INTEGERS, torch.bool),
    "BXOR": (*_INTEGERS, torch.bool),
}
"""The dtypes that each reduction supports."""
_RANGES = {"SUM": (-8, 9), "AVG": (-2, 3), "PRODUCT": (-3, 4), "MIN": (-100, 101), "MAX": (-100, 101)}
_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_AVG_STEP = 12
"""Averages of its multiples over 2, 3 or 4 members are integers."""
_POOL = 8191
"""Pool of random elements for contents: a prime number, so that adjacent parts of a tensor differ."""
_PADDING = 3
"""Elements before and after the view in its storage."""


class WrongResultError(Exception):
    """An operation completed with a wrong result in memory."""


def random_of(key: str) -> random.Random:
    """A random number generator seeded with the key, identical in every process."""
    return random.Random(hashlib.blake2b(key.encode(), digest_size=16).digest())


def moved(key: str, dtype: torch.dtype, count: int) -> Tensor:
    """[count], arbitrary bit patterns of the dtype."""
    data = _from(_noise(), key, count * dtype.itemsize)
    return data.bitwise_and_(1).view(torch.bool) if dtype is torch.bool else data.view(dtype)


def reduced(key: str, dtype: torch.dtype, count: int, op: str) -> Tensor:
    """[count], one member's input of a reduction."""
    return _from(_numbers(dtype, op), key, count)


@functools.cache
def _noise() -> Tensor:
    return torch.randint(0, 256, (_POOL,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@functools.cache
def _numbers(dtype: torch.dtype, op: str) -> Tensor:
    """Small numbers that are suitable for that reduction."""
    low, high = (0, 2) if dtype is torch.bool else _RANGES.get(op, (0, 128))
    low = max(low, 0) if dtype is torch.uint8 else low
    step = _AVG_STEP if op == "AVG" else 1
    numbers = torch.randint(low, high, (2, _POOL), generator=torch.Generator().manual_seed(1)) * step
    if dtype.is_complex:
        return torch.complex(*numbers.to(torch.float64)).to(dtype)
    return numbers[0].to(dtype)


def _from(pool: Tensor, key: str, count: int) -> Tensor:
    """[count], a copy of the pool's values from an offset that depends on the key."""
    start = random_of(key).randrange(_POOL)
    end = start + count
    return (pool if end <= _POOL else pool.repeat(-(-end // _POOL)))[start:end].clone()


def reduction(brought: list[Tensor], op: str) -> Tensor:
    """The reduction of all members' tensors."""
    total = functools.reduce(_COMBINE[op], brought)
    return total / len(brought) if op == "AVG" else total


class Box:
    """A tensor with `content` in some memory layout, surrounded by memory that must not be written."""

    def __init__(self, key: str, content: Tensor) -> None:
        self._key = key
        self._content = content
        self.tensor, self._storage = _laid_out(random_of(f"{key}/layout"), content)
        self.tensor.copy_(content.reshape(self.tensor.shape))
        self._before = self._storage.clone()

    def check(self, expected: Tensor | None = None, *, exact: bool = True) -> None:
        """Raises WrongResultError unless the tensor holds `expected`, and nothing around it was written.

        Args:
            expected: [count]; None if the contents are undefined.
            exact: compare bits instead of values: zeros and NaNs have several representations.
        """
        found = torch.empty_like(self._content)  # `contiguous` keeps the stride of a single element
        found.view(self.tensor.shape).copy_(self.tensor)
        if expected is not None:
            same = _same_bits(found, expected) if exact else torch.equal(found, expected)
            if not same:
                raise WrongResultError(f"{self._described()}: {_difference(found, expected)}")
        self.tensor.copy_(self._content.reshape(self.tensor.shape))
        if not _same_bits(self._storage, self._before):
            raise WrongResultError(f"{self._described()}: memory around the tensor was written")

    def check_unchanged(self) -> None:
        """Raises WrongResultError unless the tensor has its original content."""
        self.check(self._content)

    def _described(self) -> str:
        return f"{self._key}: {self.tensor.dtype}{list(self.tensor.shape)}, strides {self.tensor.stride()}"


def _laid_out(rng: random.Random, content: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor of the size of `content`, and the storage that it is a view of."""
    count = content.numel()
    shapes = [LAYOUTS[name](count) for name in layouts if count < 1 << 18 or name in _DENSE]
    shape, strides = rng.choice([found for found in shapes if found is not None] or [((count,), (1,))])
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1 if count else 0
    storage = torch.zeros(2 * _PADDING + extent, dtype=content.dtype)
    return storage.as_strided(shape, strides, _PADDING), storage


_Layout = tuple[tuple[int, ...], tuple[int, ...]] | None


def _rows(count: int) -> int:
    return max(math.gcd(count, 12), 1)


LAYOUTS: dict[str, Callable[[int], _Layout]] = {
    "flat": lambda count: ((count,), (1,)),
    "step 2": lambda count: ((count,), (2,)),
    "column": lambda count: ((count,), (7,)),
    "matrix": lambda count: ((_rows(count), count // _rows(count)), (count // _rows(count), 1)),
    "transposed": lambda count: ((_rows(count), count // _rows(count)), (1, _rows(count))),
    "channels last": lambda count: ((1, _rows(count), count // _rows(count), 1), (count, 1, _rows(count), 1)),
    "size 1 with odd strides": lambda count: ((1, count, 1), (7, 1, 13)),
    "part of rows": lambda count: ((_rows(count), count // _rows(count)), (count // _rows(count) + 3, 1)),
    "0-d": lambda count: ((), ()) if count == 1 else None,
}
"""Shape and strides for a number of elements; None if it does not fit. All views begin at an offset."""
_DENSE = ("flat", "matrix", "transposed")
layouts: tuple[str, ...] = tuple(LAYOUTS)
"""Those that a `Box` may have."""


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _difference(found: Tensor, expected: Tensor) -> str:
    itemsize = expected.dtype.itemsize
    differing = (found.view(torch.uint8) != expected.view(torch.uint8)).reshape(-1, itemsize).any(1).nonzero()
    if not differing.numel():
        return "it differs"
    first = int(differing[0])
    return f"{len(differing)} elements differ, the first is {first}: {found[first]} instead of {expected[first]}"
