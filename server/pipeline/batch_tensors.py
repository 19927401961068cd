"""The tensors of open requests and batches, or where they are, by the ids that the scheduler uses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from multiworld_serving.common.wire import ALL_ROWS, BatchInputs, RowRef, Source
from multiworld_serving.server.predictor import KeptRow
from multiworld_serving.server.replicas.worker_link import WorkerLink


@dataclass(slots=True)
class BatchTimes:
    """Seconds that a batch has spent so far, summed over its stages."""

    compute_s: float = 0.0
    transfer_s: float = 0.0


class ImageRef(NamedTuple):
    """An image that its frontend keeps, uint8 [1,3,H,W].

    Attributes:
        holder: the frontend: HOST:PORT/INCARNATION.
    """

    holder: str
    tensor: int


Image: TypeAlias = Tensor | ImageRef
"""uint8 [3,H,W], or where it is."""


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The input of the first stage: one image for each row; None for a request that was cancelled. At least one is an `ImageRef`."""

    images: tuple[Image | None, ...]

    @property
    def holders(self) -> frozenset[str]:
        """The frontends that keep rows."""
        return frozenset(image.holder for image in self.images if isinstance(image, ImageRef))

    def inputs(self) -> BatchInputs:
        """The message for the worker."""
        by_holder: dict[str, list[tuple[int, ImageRef]]] = {}
        relayed: list[tuple[int, Tensor]] = []
        for at, image in enumerate(self.images):
            if isinstance(image, ImageRef):
                by_holder.setdefault(image.holder, []).append((at, image))
            elif image is not None:
                relayed.append((at, image))
        sources = tuple(
            Source(holder, tuple(RowRef(image.tensor, ALL_ROWS) for _, image in rows), tuple(at for at, _ in rows))
            for holder, rows in by_holder.items()
        )
        stacked = torch.stack([image for _, image in relayed]) if relayed else None
        return BatchInputs(len(self.images), sources, stacked, tuple(at for at, _ in relayed))


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """The output of a stage, which its worker keeps until it is released or the link ends."""

    link: WorkerLink
    tensor: int
    rows: int
    row_shape: tuple[int, ...]

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
        return BatchInputs(self.rows, (source,))

    def row(self, row: int) -> KeptRow:
        """One row, for the frontend that fetches it."""
        return KeptRow(self.holder, self.tensor, row, self.row_shape)

    def release(self) -> None:
        """Tell the worker that it is not needed any more."""
        self.link.release(self.tensor)


StoredInput: TypeAlias = Tensor | ImageRows | KeptOutput


def relayed_inputs(tensor: Tensor) -> BatchInputs:
    """The message for an input that the leader has."""
    return BatchInputs(len(tensor), (), tensor, tuple(range(len(tensor))))


def relayed_bytes(tensor: StoredInput) -> int:
    """Bytes of this input or output that pass the leader."""
    if isinstance(tensor, Tensor):
        return tensor.nbytes
    if isinstance(tensor, ImageRows):
        return sum(image.nbytes for image in tensor.images if isinstance(image, Tensor))
    return 0


class BatchTensors:
    """Stores the images of open requests and the input of each batch's current stage. Releases kept outputs that are replaced or freed."""

    def __init__(self) -> None:
        self.images: dict[int, Image] = {}
        """By request, until the request is closed."""
        self.times: dict[int, BatchTimes] = {}
        self._inputs: dict[int, StoredInput] = {}

    def __len__(self) -> int:
        return len(self.images) + len(self._inputs)

    def get_input(self, batch: int, requests: tuple[int, ...] = ()) -> StoredInput:
        """The stored input of the batch. Without one, collects and stores the images of `requests` (first stage).

        Raises:
            LookupError: there is neither a stored input nor an image.
        """
        if batch not in self._inputs:
            self._collect(batch, requests)
        return self._inputs[batch]

    def requests_at(self, requests: tuple[int, ...], holders: Collection[str]) -> list[int]:
        """Those of `requests` whose image is kept by one of `holders`."""
        found = ((request, self.images.get(request)) for request in requests)
        return [request for request, image in found if isinstance(image, ImageRef) and image.holder in holders]

    def _collect(self, batch: int, requests: tuple[int, ...]) -> None:
        """Stack the requests' images into uint8 [B,3,H,W]. A request that was cancelled meanwhile becomes a row of zeros."""
        rows = [self.images.get(request) for request in requests]
        if any(isinstance(row, ImageRef) for row in rows):
            self.replace(batch, ImageRows(tuple(rows)))
        else:
            known = [row for row in rows if isinstance(row, Tensor)]
            if not known:
                raise LookupError(f"there is no input for batch {batch}")
            zeros = torch.zeros_like(known[0])
            self.replace(batch, torch.stack([row if isinstance(row, Tensor) else zeros for row in rows]))
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
