"""The tensors of open requests and batches, or where they are, by the ids that the scheduler uses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from multiworld_serving.common.wire.inputs import ALL_ROWS, BatchInputs, LostInput, RowRef, Source
from multiworld_serving.common.wire.message import RowShape
from multiworld_serving.server.predictor import KeptRows
from multiworld_serving.server.replicas.worker_link import WorkerLink


@dataclass(slots=True)
class BatchTimes:
    """Seconds that a batch has spent so far, summed over its stages."""

    compute_s: float = 0.0
    transfer_s: float = 0.0


class InputRef(NamedTuple):
    """The input row of a request that its frontend keeps.

    Attributes:
        holder: the frontend: HOST:PORT/INCARNATION.
        row: of the tensor.
        row_bytes: see `BatchInputs`.
    """

    holder: str
    tensor: int
    row: int = 0
    row_bytes: int = 0


InputRow: TypeAlias = Tensor | InputRef
"""The input row of a request, without batch dimension, or where it is."""


@dataclass(frozen=True, slots=True)
class InputRows:
    """The input of the first stage. At least one row is an `InputRef`."""

    rows: tuple[InputRow, ...]

    @property
    def holders(self) -> frozenset[str]:
        """The frontends that keep rows."""
        return frozenset(row.holder for row in self.rows if isinstance(row, InputRef))

    def inputs(self) -> BatchInputs:
        """The message for the worker."""
        by_holder: dict[str, list[tuple[int, InputRef]]] = {}
        relayed: list[tuple[int, Tensor]] = []
        row_bytes = 0
        for at, row in enumerate(self.rows):
            if isinstance(row, InputRef):
                by_holder.setdefault(row.holder, []).append((at, row))
                row_bytes = row.row_bytes
            else:
                relayed.append((at, row))
                row_bytes = len(row) if row.dtype == torch.uint8 and row.dim() == 1 else 0
        sources = tuple(
            Source(holder, tuple(RowRef(ref.tensor, ref.row) for _, ref in refs), tuple(at for at, _ in refs))
            for holder, refs in by_holder.items()
        )
        stacked = torch.stack([row for _, row in relayed]) if relayed else None
        relayed_at = tuple(at for at, _ in relayed)
        return BatchInputs(len(self.rows), sources, stacked, relayed_at, row_bytes=row_bytes)


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
        return self.link.request.edge

    @property
    def holders(self) -> frozenset[str]:
        """The worker that keeps it."""
        return frozenset((self.holder,))

    def inputs(self) -> BatchInputs:
        """The message for the worker of the next stage."""
        source = Source(self.holder, (RowRef(self.tensor, ALL_ROWS),), tuple(range(self.rows)))
        return BatchInputs(self.rows, (source,), row_bytes=self.row_shape.dims[0] if self.row_shape.varies else 0)

    def rows_at(self, rows: tuple[int, ...], at: tuple[int, ...]) -> KeptRows:
        """Rows for the frontend that fetches them; they answer the samples `at` of its request."""
        return KeptRows(self.holder, self.tensor, rows, at, self.row_shape.dims)

    def release(self) -> None:
        """Tell the worker that it is not needed any more."""
        self.link.release(self.tensor)


StoredInput: TypeAlias = Tensor | InputRows | KeptOutput


def relayed_inputs(tensor: Tensor) -> BatchInputs:
    """The message for an input that the leader has."""
    row_bytes = tensor.shape[1] if tensor.dtype == torch.uint8 and tensor.dim() == 2 else 0
    return BatchInputs(len(tensor), (), tensor, tuple(range(len(tensor))), row_bytes=row_bytes)


def relayed_bytes(tensor: StoredInput) -> int:
    """Bytes of this input or output that pass the leader."""
    if isinstance(tensor, Tensor):
        return tensor.nbytes
    if isinstance(tensor, InputRows):
        return sum(row.nbytes for row in tensor.rows if isinstance(row, Tensor))
    return 0


class BatchTensors:
    """The input rows of open requests and the input of each batch's current stage. Releases kept outputs that are replaced or freed."""

    def __init__(self) -> None:
        self.rows: dict[int, InputRow] = {}
        """By request, until the request is closed."""
        self.times: dict[int, BatchTimes] = {}
        self._inputs: dict[int, StoredInput] = {}

    def __len__(self) -> int:
        return len(self.rows) + len(self._inputs)

    def get_input(self, batch: int, requests: tuple[int, ...] = ()) -> StoredInput:
        """The stored input of the batch. Without one, collects and stores the rows of `requests` (first stage).

        Raises:
            LookupError: there is neither a stored input nor a row.
        """
        if batch not in self._inputs:
            self._collect(batch, requests)
        return self._inputs[batch]

    def requests_at(self, requests: tuple[int, ...], holders: Collection[str]) -> list[int]:
        """Those of `requests` whose input is kept by one of `holders`."""
        found = ((request, self.rows.get(request)) for request in requests)
        return [request for request, row in found if isinstance(row, InputRef) and row.holder in holders]

    def relayed_holders(self, batch: int, lost: LostInput) -> tuple[str, ...]:
        """The producers from which the worker cannot fetch: unreachable ones, and one that no longer has its tensor."""
        stored = self._inputs.get(batch)
        if isinstance(stored, KeptOutput) and stored.holder in lost.holders:
            return (stored.holder,)
        return lost.unreachable

    def _collect(self, batch: int, requests: tuple[int, ...]) -> None:
        """Stack the requests' rows into [B, …]. A request that was cancelled meanwhile gets the row of another one, of the same form."""
        found = [self.rows.get(request) for request in requests]
        other = next((row for row in found if row is not None), None)
        if other is None:
            raise LookupError(f"there is no input for batch {batch}")
        rows = [other if row is None else row for row in found]
        tensors = [row for row in rows if isinstance(row, Tensor)]
        self.replace(batch, torch.stack(tensors) if len(tensors) == len(rows) else InputRows(tuple(rows)))
        self.times[batch] = BatchTimes()

    def replace(self, batch: int, stored: StoredInput) -> None:
        """Store the input of the batch's next stage, and free the previous one."""
        self.free_input(batch)
        self._inputs[batch] = stored

    def free_input(self, batch: int) -> None:
        """Free the batch's input."""
        if isinstance(previous := self._inputs.pop(batch, None), KeptOutput):
            previous.release()

    def free(self, batch: int) -> None:
        """Free everything that is stored for the batch."""
        self.free_input(batch)
        self.times.pop(batch, None)
