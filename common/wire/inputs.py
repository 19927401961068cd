"""References of tensors that stay where they were computed: in messages between leader and worker, and on edges.

A batch whose input is not in the message is sent as INPUTS: where to fetch each row. Rows that only the leader has follow in the same
message.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from msgspec import Meta
from msgspec.structs import replace
from torch import Tensor

from multiworld_serving.common.wire.join import Holder, JsonMessage
from multiworld_serving.common.wire.message import MAX_TEXT_BYTES, Message, MessageKind, WireError, bytes_tensor

ALL_ROWS = -1
"""The row of a reference to a whole tensor."""
MAX_FETCH_ROWS = 1024
MAX_INPUTS_HEAD_BYTES = 4 * MAX_TEXT_BYTES
"""Most bytes of an INPUTS message without relayed rows."""
_HEAD = struct.Struct("!I")
_ALIGNED_BYTES = 64
"""Relayed rows start at a multiple of this."""
MAX_RELEASED = 1024


class RowRef(NamedTuple):
    """A row of a tensor that a producer keeps.

    Attributes:
        tensor: its id at the producer.
        row: or `ALL_ROWS`.
    """

    tensor: int
    row: int


def row_refs_tensor(refs: Sequence[RowRef]) -> Tensor:
    """References as the payload of FETCH_ROWS: int64 [N, 2]."""
    return torch.tensor(list(refs), dtype=torch.int64).view(len(refs), 2)


def row_refs(payload: Tensor) -> list[RowRef]:
    """The inverse of `row_refs_tensor`."""
    return [RowRef(tensor, row) for tensor, row in payload.tolist()]


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


class BatchInputs(msgspec.Struct, frozen=True, array_like=True):
    """Where the rows of a batch are. Rows that appear nowhere are zeros.

    Attributes:
        rows: number of rows of the batch.
        relayed: the rows that are in this message, [len(relayed_at), *sample shape]; None if there are none.
        keep: the output should stay at the worker (KEPT); otherwise it comes with the result.
        expires_s: after how many seconds the worker frees a kept output by itself; 0: not at all.
        release: ids of earlier outputs of the worker that are not needed any more.
        row_bytes: length of packed rows: uint8 [row_bytes]; 0: they have the shape of the stage's input.
    """

    rows: Annotated[int, Meta(ge=1)]
    sources: tuple[Source, ...]
    relayed: Any = None
    relayed_at: tuple[int, ...] = ()
    keep: bool = True
    expires_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    release: Annotated[tuple[int, ...], Meta(max_length=MAX_RELEASED)] = ()
    row_bytes: int = 0

    def message(self, batch: int, stage: int, version: int) -> Message:
        """The INPUTS message: these fields as JSON, and the relayed rows."""
        text = msgspec.json.encode(replace(self, relayed=None))
        head = _HEAD.pack(len(text)) + text
        head += b" " * (-len(head) % _ALIGNED_BYTES)
        payload = bytes_tensor(head)
        if self.relayed is not None:
            payload = torch.cat((payload, self.relayed.contiguous().view(-1).view(torch.uint8)))
        return Message(MessageKind.INPUTS, batch, payload, stage=stage, version=version)

    @classmethod
    def parse(cls, payload: Tensor, dtype: torch.dtype, sample_shape: tuple[int, ...], max_rows: int) -> BatchInputs:
        """Decode the payload of INPUTS.

        Args:
            dtype, sample_shape: of the stage's input; the longest one if its length varies.
        Raises:
            WireError: it is invalid.
        """
        try:
            data = payload.numpy().data
            (length,) = _HEAD.unpack_from(data, 0)
            if length > len(data) - _HEAD.size:
                raise WireError(f"INPUTS: {length} bytes of text in a message of {len(data)}")
            found = msgspec.json.decode(data[_HEAD.size : _HEAD.size + length], type=cls)
            body = payload[_HEAD.size + length + -(_HEAD.size + length) % _ALIGNED_BYTES :]
            shape = (len(found.relayed_at), *found.row_shape(sample_shape))
            found = replace(found, relayed=body.view(dtype).view(shape) if found.relayed_at else None)
        except (msgspec.MsgspecError, ValueError, RecursionError, RuntimeError, struct.error) as error:
            raise WireError(f"INPUTS is invalid: {error!s:.200}") from error
        found._check(max_rows)
        return found

    def row_shape(self, longest: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the rows, where that of the stage's input is `longest`. Raises ValueError."""
        if not self.row_bytes:
            return longest
        if len(longest) != 1 or not 0 < self.row_bytes <= longest[0]:
            raise ValueError(f"rows of {self.row_bytes} bytes for an input of {longest}")
        return (self.row_bytes,)

    def _check(self, max_rows: int) -> None:
        positions = [at for source in self.sources for at in source.at] + list(self.relayed_at)
        if self.rows > max_rows:
            raise WireError(f"INPUTS: {self.rows} rows; expected 1 to {max_rows}")
        if len(set(positions)) < len(positions) or any(not 0 <= at < self.rows for at in positions):
            raise WireError("INPUTS: the positions of its rows are invalid")


class LostInput(JsonMessage, frozen=True, forbid_unknown_fields=True):
    """Why a worker could not get the input of a batch.

    Attributes:
        holders: the producers that could not send their rows.
        unreachable: those of them that this worker cannot reach; the others do not have the rows any more.
        detail: for the log.
    """

    holders: tuple[str, ...]
    unreachable: tuple[str, ...]
    detail: str
