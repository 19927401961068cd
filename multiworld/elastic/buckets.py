"""Groups the tensors of a call into buckets: small tensors share a bucket, a large tensor has its own.

No tensor is written before `unpack`, which runs after its bucket has finished on all members. So the tensors keep their original
values until then, and nothing has to be restored.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multiworld.ops.buffers import RecvBuffer, check_dense
from multiworld.ops.validation import check_distinct

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)
BUCKET_BYTES = 1 << 20
"""Maximum bytes of a bucket with several tensors: large enough to share one transfer, small enough to repeat little after a failure."""
_ALIGNMENT = 64
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one dtype and device that are reduced together."""

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
    """Group the tensors, in the given order, into buckets. Raises TypeError, ValueError."""
    writable = [_writable(name, tensor) for tensor in tensors]
    check_distinct(name, writable)
    buckets: list[list[Tensor]] = []
    size = 0
    for tensor in writable:
        first = buckets[-1][0] if buckets else None
        size += tensor.nbytes
        if first is None or size > BUCKET_BYTES or (first.dtype, first.device) != (tensor.dtype, tensor.device):
            buckets.append([])
            size = tensor.nbytes
        buckets[-1].append(tensor)
    return [Bucket(tuple(each)) for each in buckets]


def _writable(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor, without its gradient. Raises TypeError, ValueError if a result cannot be written into it."""
    check_dense(name, tensor)
    if tensor.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"{name}: cannot reduce {tensor.dtype}; expected one of {known}")
    return RecvBuffer(name, tensor, on_host=False).tensor


class Workspace:
    """Memory for the results of a call until its round is committed. It has the size of the largest call so far and is reused."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def allocate(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        """Return flat host memory for the result of each bucket."""
        ends = list(itertools.accumulate((-(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for each in buckets), initial=0))
        if self._memory.numel() < ends[-1]:
            self._memory = torch.empty(ends[-1], dtype=torch.uint8)
        return [
            self._memory[begin : begin + bucket.nbytes].view(bucket.dtype)
            for begin, bucket in zip(ends, buckets, strict=False)
        ]

    def free(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
