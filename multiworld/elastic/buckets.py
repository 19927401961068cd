"""Groups the tensors of a call into buckets: small tensors share a bucket, a large tensor has its own.

No tensor is written before `unpack`, which runs after its bucket has finished on all members. So the tensors keep their original
values until then, and nothing has to be restored.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from multiworld.ops.buffers import check_dense

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)
BUCKET_BYTES = 1 << 20
"""Maximum bytes of a bucket with several tensors: large enough to share one transfer, small enough to repeat little after a failure."""
_ALIGNMENT = 64
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one dtype and device that are reduced together.

    Attributes:
        indices: indices of these tensors in the call, and of the empty tensors that share the outcome of this bucket.
        tensors: the tensors that have elements.
    """

    indices: tuple[int, ...]
    tensors: tuple[Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def count(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def operand(self) -> Tensor:
        """Return the elements as one flat, contiguous tensor on the host: a view of a single contiguous host tensor, otherwise a copy."""
        only = self.tensors[0]
        if len(self.tensors) == 1 and only.is_contiguous() and only.device.type == "cpu":
            return only.view(-1)
        return torch.cat([tensor.reshape(-1) for tensor in self.tensors]).cpu()

    def unpack(self, result: Tensor) -> None:
        """Copy the result into the tensors."""
        with torch.inference_mode():
            parts = result.to(self.tensors[0].device).split_with_sizes([tensor.numel() for tensor in self.tensors])
            torch._foreach_copy_(
                list(self.tensors), [part.view(tensor.shape) for part, tensor in zip(parts, self.tensors, strict=True)]
            )


def make_buckets(name: str, tensors: Sequence[Tensor]) -> list[Bucket]:
    """Group the tensors, in the given order, into buckets. Raises TypeError, ValueError.

    Empty tensors belong to the first bucket, so that the members agree on their contributors as well. If all tensors are empty, that
    bucket has one element of its own.
    """
    indexed = [(index, _checked(name, tensor)) for index, tensor in enumerate(tensors)]
    _check_distinct(name, [tensor for _, tensor in indexed])
    buckets: list[Bucket] = []
    for _, group in itertools.groupby(indexed, lambda each: (each[1].dtype, each[1].device)):
        buckets += _split(group)
    empty = tuple(index for index, tensor in indexed if not tensor.numel())
    if empty and not buckets:
        buckets = [Bucket((), (torch.zeros(1),))]
    if empty:
        buckets[0] = replace(buckets[0], indices=buckets[0].indices + empty)
    return buckets


def _split(group: Iterator[tuple[int, Tensor]]) -> Iterator[Bucket]:
    indices: list[int] = []
    tensors: list[Tensor] = []
    size = 0
    for index, tensor in group:
        if not tensor.numel():
            continue
        if tensors and size + tensor.nbytes > BUCKET_BYTES:
            yield Bucket(tuple(indices), tuple(tensors))
            indices, tensors, size = [], [], 0
        indices.append(index)
        tensors.append(tensor)
        size += tensor.nbytes
    if tensors:
        yield Bucket(tuple(indices), tuple(tensors))


def _checked(name: str, tensor: Tensor) -> Tensor:
    check_dense(name, tensor)
    if tensor.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"{name}: cannot reduce {tensor.dtype}; expected one of {known}")
    if tensor.is_neg():
        raise ValueError(
            f"{name}: cannot write into a negated view, such as the imaginary part of a conjugate; call resolve_neg() first"
        )
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError(f"{name}: cannot write into an expanded tensor, strides {tensor.stride()}; clone it first")
    return tensor.detach()


def _check_distinct(name: str, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError when two tensors begin at the same memory, because the second result would overwrite the first."""
    filled = [(tensor.device, tensor.data_ptr()) for tensor in tensors if tensor.numel()]
    if len(set(filled)) != len(filled):
        raise ValueError(f"{name}: the same tensor was given twice")


class Workspace:
    """Memory for the results of a call until its round is committed. It has the size of the largest call so far and is reused."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def allocate(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        """Return flat host memory for the result of each bucket."""
        ends = list(itertools.accumulate((_aligned(bucket.nbytes) for bucket in buckets), initial=0))
        if self._memory.numel() < ends[-1]:
            self._memory = torch.empty(ends[-1], dtype=torch.uint8)
        return [
            self._memory[begin : begin + bucket.nbytes].view(bucket.dtype)
            for begin, bucket in zip(ends, buckets, strict=False)
        ]

    def free(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
