"""Inputs of batches: tensors that the leader has, or references to tensors that other processes keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from multiworld_serving.common.wire.inputs import BatchInputs, RowRef, Source, joined_rows
from multiworld_serving.server.leader.replicas.worker_link import KeptOutput


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


def rows_of(tensor: Tensor, rows: tuple[int, ...]) -> Tensor:
    """These rows of a tensor. Neighbours are a view, not a copy. Raises IndexError."""
    first, end, count = rows[0], rows[-1] + 1, tensor.shape[0]
    if end > count:
        raise IndexError(f"row {end - 1} of a tensor with {count} rows")
    if len(rows) == count == 1:
        return tensor
    return tensor[first:end] if len(rows) == 1 or rows == tuple(range(first, end)) else tensor[list(rows)]


def batch_input(rows: Sequence[tuple[RequestInput, int] | None]) -> BatchInputs:
    """The input of a batch for the first stage, from (input of the request, row of it).

    None stands for a request that was cancelled meanwhile. It gets the row of another one, of the same form.

    Raises:
        LookupError: all requests were cancelled.
    """
    other = next((row for row in rows if row is not None), None)
    if other is None:
        raise LookupError("there is no input for this batch")
    sources: dict[str, tuple[list[RowRef], list[int]]] = {}
    relayed: list[tuple[Tensor, list[int]]] = []
    relayed_at: list[int] = []
    row_bytes = 0
    for at, row in enumerate(rows):
        source, number = row or other
        if isinstance(source, RemoteInput):
            row_bytes = max(row_bytes, source.row_bytes)
            refs, positions = sources.setdefault(source.holder, ([], []))
            refs.append(RowRef(source.tensor, number))
            positions.append(at)
            continue
        relayed_at.append(at)
        if relayed and relayed[-1][0] is source:
            relayed[-1][1].append(number)
        else:
            relayed.append((source, [number]))
    tensor = joined_rows([rows_of(source, tuple(numbers)) for source, numbers in relayed]) if relayed else None
    if tensor is not None and not sources:
        return relayed_inputs(tensor)
    relayed_bytes = 0 if tensor is None else _row_bytes(tensor)
    return BatchInputs(
        len(rows),
        tuple(Source(holder, tuple(refs), tuple(positions)) for holder, (refs, positions) in sources.items()),
        tensor,
        tuple(relayed_at),
        row_bytes=max(row_bytes, relayed_bytes),
        relayed_row_bytes=relayed_bytes,
    )


def relayed_inputs(tensor: Tensor) -> BatchInputs:
    """An input that the leader has."""
    return BatchInputs(len(tensor), (), tensor, tuple(range(len(tensor))), row_bytes=_row_bytes(tensor))


def _row_bytes(tensor: Tensor) -> int:
    """The length of packed rows; 0: they are not packed."""
    return tensor.shape[1] if tensor.dtype == torch.uint8 and tensor.dim() == 2 else 0


def relayed_bytes(tensor: Tensor | BatchInputs | KeptOutput) -> int:
    """Bytes of this input or output that pass the leader."""
    if isinstance(tensor, BatchInputs):
        return 0 if tensor.relayed is None else tensor.relayed.nbytes
    return tensor.nbytes if isinstance(tensor, Tensor) else 0
