"""Inputs of batches: tensors that the leader has, or references to tensors that other processes keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from multiworld_serving.common.wire.inputs import ALL_ROWS, BatchInputs, RowRef, Source
from multiworld_serving.common.wire.message import RowShape
from multiworld_serving.server.replicas.worker_link import WorkerLink


class RemoteInput(NamedTuple):
    """The input of a request that its frontend keeps.

    Attributes:
        holder: the frontend: HOST:PORT/INCARNATION.
        tensor: its id at the frontend.
        row_bytes: see `BatchInputs`.
    """

    holder: str
    tensor: int
    row_bytes: int = 0


RequestInput: TypeAlias = Tensor | RemoteInput
"""The input rows of a request, [N, …], or where they are."""


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """The output of a stage, which its worker keeps until it is released or the link ends."""

    link: WorkerLink
    tensor: int
    rows: int
    row_shape: RowShape

    @property
    def holder(self) -> str:
        """The worker that keeps it."""
        return self.link.worker.request.edge

    def inputs(self) -> BatchInputs:
        """The message for the worker of the next stage."""
        source = Source(self.holder, (RowRef(self.tensor, ALL_ROWS),), tuple(range(self.rows)))
        return BatchInputs(self.rows, (source,), row_bytes=self.row_bytes)

    @property
    def row_bytes(self) -> int:
        """See `BatchInputs`."""
        return self.row_shape.dims[0] if self.row_shape.varies else 0

    def rows_at(self, rows: tuple[int, ...], at: tuple[int, ...]) -> Source:
        """Rows for the frontend that fetches them; they answer the samples `at` of its request."""
        return Source(self.holder, tuple(RowRef(self.tensor, row) for row in rows), at)

    def release(self) -> None:
        """Tell the worker that it is not needed any more."""
        self.link.release(self.tensor)


@dataclass(slots=True)
class _Slice:
    """Consecutive rows of a request, and the position of the first one in the batch."""

    input: RequestInput
    first: int
    at: int
    rows: int = 1

    @property
    def positions(self) -> range:
        return range(self.at, self.at + self.rows)


def batch_input(rows: Sequence[tuple[RequestInput, int] | None]) -> Tensor | BatchInputs:
    """The input of a batch for the first stage, from (input of the request, row of it).

    None stands for a request that was cancelled meanwhile. It gets the row of another one, of the same form.

    Raises:
        LookupError: all requests were cancelled.
    """
    other = next((row for row in rows if row is not None), None)
    if other is None:
        raise LookupError("there is no input for this batch")
    slices: list[_Slice] = []
    for at, row in enumerate(rows):
        tensor, number = row or other
        if slices and slices[-1].input is tensor and slices[-1].first + slices[-1].rows == number:
            slices[-1].rows += 1
        else:
            slices.append(_Slice(tensor, number, at))
    tensors = [each.input[each.first : each.first + each.rows] for each in slices if isinstance(each.input, Tensor)]
    relayed = None if not tensors else tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    if relayed is not None and len(tensors) == len(slices):
        return relayed
    refs: dict[str, list[tuple[int, RowRef]]] = {}
    relayed_at: list[int] = []
    row_bytes = 0
    for each in slices:
        if isinstance(each.input, RemoteInput):
            row_bytes = each.input.row_bytes
            found = (RowRef(each.input.tensor, each.first + row) for row in range(each.rows))
            refs.setdefault(each.input.holder, []).extend(zip(each.positions, found, strict=True))
        else:
            relayed_at += each.positions
    sources = tuple(
        Source(holder, tuple(ref for _, ref in found), tuple(at for at, _ in found)) for holder, found in refs.items()
    )
    return BatchInputs(len(rows), sources, relayed, tuple(relayed_at), row_bytes=row_bytes)


def relayed_inputs(tensor: Tensor) -> BatchInputs:
    """The message for an input that the leader has."""
    row_bytes = tensor.shape[1] if tensor.dtype == torch.uint8 and tensor.dim() == 2 else 0
    return BatchInputs(len(tensor), (), tensor, tuple(range(len(tensor))), row_bytes=row_bytes)


def relayed_bytes(tensor: Tensor | BatchInputs | KeptOutput) -> int:
    """Bytes of this input or output that pass the leader."""
    if isinstance(tensor, BatchInputs):
        return 0 if tensor.relayed is None else tensor.relayed.nbytes
    return tensor.nbytes if isinstance(tensor, Tensor) else 0
