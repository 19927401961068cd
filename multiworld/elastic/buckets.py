"""Groups the tensors of a call into buckets: small tensors share a bucket, a large tensor has its own.

No tensor is written before `unpack`, which runs after its bucket has finished on all members. So the tensors keep their original
values until then, and nothing has to be restored.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multiworld.ops.buffers import RecvBuffer, check_dense
from multiworld.ops.validation import check_distinct

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)
BUCKET_BYTES = 1 << 20
"""Maximum bytes of a bucket with several tensors: large enough to share one transfer, small enough to repeat little after a failure."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one dtype and device that are reduced together."""

    tensors: tuple[Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def copy(self) -> Tensor:
        """Return the elements as one flat, contiguous tensor on the host, in memory of its own."""
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
