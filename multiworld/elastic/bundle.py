"""The tensors of a call as what goes over the wire: small ones together in one bundle, large ones alone.

Nothing is written to a tensor before `deliver`, which is called once its bundle has finished at all members. So a tensor is its own
original: restoring it is leaving it alone.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multiworld.buffers import check_dense
from multiworld.elastic.reduction import DTYPES

BUNDLE_BYTES = 1 << 20
"""Tensors are put together up to this size: one all-reduce then does for many, and what is done again after a failure stays small."""
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tensors of one dtype and device that are reduced as one.

    Attributes:
        indices: their places among the tensors of the call.
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
        """Flat, contiguous, on the host: the memory of a large tensor itself where that is so, else a copy."""
        only = self.tensors[0]
        if len(self.tensors) == 1 and only.is_contiguous() and only.device.type == "cpu":
            return only.view(-1)
        return torch.cat([tensor.reshape(-1) for tensor in self.tensors]).cpu()

    @torch.inference_mode()
    def pack(self, into: Tensor) -> None:
        """Copy all of it to flat host memory."""
        if self.tensors[0].device.type == "cpu":
            torch.cat([tensor.reshape(-1) for tensor in self.tensors], out=into)
        else:
            into.copy_(self.operand())

    def deliver(self, result: Tensor) -> None:
        """Write the results into the tensors."""
        with torch.inference_mode():
            parts = result.to(self.tensors[0].device).split_with_sizes([tensor.numel() for tensor in self.tensors])
            torch._foreach_copy_(
                list(self.tensors), [part.view(tensor.shape) for part, tensor in zip(parts, self.tensors, strict=True)]
            )


def bundles(name: str, tensors: Sequence[Tensor]) -> list[Bundle]:
    """The tensors in the order given, but empty ones. Raises TypeError, ValueError."""
    indexed = [(index, _checked(name, tensor)) for index, tensor in enumerate(tensors)]
    _check_apart(name, [tensor for _, tensor in indexed])
    made: list[Bundle] = []
    for _, run in itertools.groupby(indexed, lambda each: (each[1].dtype, each[1].device)):
        made += _split(run)
    return made


def _split(run: Iterator[tuple[int, Tensor]]) -> Iterator[Bundle]:
    indices: list[int] = []
    held: list[Tensor] = []
    size = 0
    for index, tensor in run:
        if not tensor.numel():
            continue
        if held and size + tensor.nbytes > BUNDLE_BYTES:
            yield Bundle(tuple(indices), tuple(held))
            indices, held, size = [], [], 0
        indices.append(index)
        held.append(tensor)
        size += tensor.nbytes
    if held:
        yield Bundle(tuple(indices), tuple(held))


def _checked(name: str, tensor: Tensor) -> Tensor:
    check_dense(name, tensor)
    if tensor.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"{name}: cannot reduce {tensor.dtype}; expected one of {known}")
    if tensor.is_neg():
        raise ValueError(
            f"{name}: cannot write into a negated view, the imaginary part of a conjugate say; resolve it first"
        )
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError(f"{name}: cannot write into an expanded tensor, strides {tensor.stride()}; clone it first")
    return tensor.detach()


def _check_apart(name: str, tensors: Sequence[Tensor]) -> None:
    """Raises ValueError when two tensors begin at the same memory: the second result would overwrite the first."""
    filled = [(tensor.device, tensor.data_ptr()) for tensor in tensors if tensor.numel()]
    if len(set(filled)) != len(filled):
        raise ValueError(f"{name}: the same tensor was given twice")


class Workspace:
    """Memory for results that nobody may see yet: as much as the operands of the largest call so far, kept from call to call."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def room_for(self, made: Sequence[Bundle]) -> list[Tensor]:
        """Flat memory for the result of each."""
        ends = list(itertools.accumulate((_aligned(bundle.nbytes) for bundle in made), initial=0))
        if self._memory.numel() < ends[-1]:
            self._memory = torch.empty(ends[-1], dtype=torch.uint8)
        return [
            self._memory[begin : begin + bundle.nbytes].view(bundle.dtype)
            for begin, bundle in zip(ends, made, strict=False)
        ]

    def free(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
