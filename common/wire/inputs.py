"""References of tensors that stay where they were computed: in messages between leader and worker, and on edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from multiworld_serving.common.wire.join import Holder
from multiworld_serving.common.wire.protocol import Failure

ALL_ROWS = -1
"""The row of a reference to a whole tensor."""
MAX_FETCH_ROWS = 1024


class RowRef(NamedTuple):
    """A row of a tensor that a producer keeps.

    Attributes:
        tensor: its id at the producer.
        row: or `ALL_ROWS`.
    """

    tensor: int
    row: int


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """Consumer to producer, on an edge: send these rows, concatenated.

    Attributes:
        take: nobody else needs these rows.
        row_bytes: shorter rows of bytes are sent with this length, ending in zeros; 0: as they are.
    """

    refs: Annotated[tuple[RowRef, ...], Meta(min_length=1, max_length=MAX_FETCH_ROWS)]
    take: bool = False
    row_bytes: Annotated[int, Meta(ge=0)] = 0


class Source(msgspec.Struct, frozen=True, array_like=True):
    """Rows of a batch that one producer keeps.

    Attributes:
        holder: the producer: HOST:PORT/INCARNATION.
        refs: their references, or a single one to a whole tensor.
        at: their positions in the batch, ascending.
    """

    holder: Holder
    refs: Annotated[tuple[RowRef, ...], Meta(min_length=1)]
    at: tuple[int, ...]

    def __post_init__(self) -> None:
        is_whole = len(self.refs) == 1 and self.refs[0].row == ALL_ROWS
        if not is_whole and len(self.refs) != len(self.at):
            raise ValueError(f"{len(self.refs)} references for {len(self.at)} rows")


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """The rows of these tensors. Rows of bytes that are shorter than the longest one end in zeros."""
    if len(parts) == 1:
        return parts[0]
    shapes = {each.shape[1:] for each in parts}
    if len(shapes) == 1:
        return torch.cat(list(parts))
    row_shape = max(shapes)
    return join_rows(parts, torch.empty((sum(map(len, parts)), *row_shape), dtype=parts[0].dtype))


def join_rows(parts: Sequence[Tensor], into: Tensor) -> Tensor:
    """As `joined_rows`, into a tensor whose rows may be longer."""
    if all(each.shape[1:] == into.shape[1:] for each in parts):
        return torch.cat(list(parts), out=into)
    for each, rows in zip(parts, torch.split(into, [len(each) for each in parts]), strict=True):
        rows[:, : each.shape[1]] = each
        rows[:, each.shape[1] :] = 0
    return into


class RowsLostError(Exception):
    """Rows could not be fetched from the processes that keep them. Their request runs again with all tensors relayed by the leader."""


class RowsLost(Failure, frozen=True):
    """The reply to a batch or a request if the rows of an input could not be fetched."""

    why: str

    def error(self) -> Exception:
        return RowsLostError(self.why)


class BatchInputs(msgspec.Struct, frozen=True, array_like=True):
    """Where the rows of a batch are: at producers, or in the payload of the message. Rows that appear nowhere are zeros.

    Attributes:
        rows: number of rows of the batch.
        relayed: the rows that are in the payload, [len(relayed_at), *sample shape]; None if there are none.
        keep: the output should stay at the worker; otherwise it comes with the result, because everything of the batch is relayed.
        row_bytes: length of packed rows: uint8 [row_bytes]; 0: they have the shape of the stage's input. Shorter ones end in zeros then.
        relayed_row_bytes: length of those in the payload; 0: `row_bytes`.
    """

    rows: Annotated[int, Meta(ge=1)]
    sources: tuple[Source, ...]
    relayed: Any = None
    relayed_at: tuple[int, ...] = ()
    keep: bool = True
    row_bytes: int = 0
    relayed_row_bytes: int = 0

    def check(self, max_rows: int) -> None:
        """Raise ValueError if there are more rows, or if their positions are invalid."""
        positions = [at for source in self.sources for at in source.at] + list(self.relayed_at)
        if self.rows > max_rows:
            raise ValueError(f"a batch of {self.rows} rows; expected 1 to {max_rows}")
        if len(set(positions)) < len(positions) or any(not 0 <= at < self.rows for at in positions):
            raise ValueError("the positions of the rows of a batch are invalid")
