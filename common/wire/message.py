"""A message between leader and worker: a header, which travels in the head of the library's message, and a payload.

The header is checked twice before memory is allocated for the payload: `Message.parse` rejects an inconsistent header, and the receiver
rejects a dtype or shape that it does not expect.
"""

import math
import struct
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from multiworld.texts import one_line

MAX_DIMS = 4
MAX_TEXT_BYTES = 64 << 10
_MAGIC = 0xB4
"""First byte of a header of this version. Not ASCII, so that no signature of a tensor begins with it."""
_LAYOUT = struct.Struct("!BBBBQQII4x4I")
"""Magic, kind, dtype * 16 + number of dimensions, stage, batch, ns computed, µs waited, version, 4 unused bytes, dimensions.
It is as long as the head of a message of the library."""
_MOST_US = 2**32 - 1
HEADER_BYTES = _LAYOUT.size

_DTYPES = (torch.uint8, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class WireError(ValueError):
    """The peer sent something that no leader or worker of this version sends."""


class MessageKind(IntEnum):
    """Types of messages."""

    ASSIGN = 1  # leader → worker: load and serve a stage (StageAssignment as JSON)
    WEIGHTS = 2  # leader → worker: a chunk of the stage's graph and weights
    READY = 3  # worker → leader: the stage is loaded and warmed up
    BATCH = 4  # leader → worker: input for an assigned stage
    RESULT = 5  # worker → leader: output for a batch
    FAILED = 6  # worker → leader: the stage raised; the payload is the error text
    LEAVING = 7  # worker → leader: send no new batches, and close the world after the last answer
    RESTART = 8  # leader → worker: leave and exit; the supervisor starts the process again
    UNLOAD = 9  # leader → worker: unload the stages of this version
    UNABLE = 10  # leader → worker: why the leader cannot serve what the other leaders serve (text); empty: it can
    FETCH_WEIGHTS = 20  # worker → leader: send the weights of the assigned stage; without it, the worker has the stage
    OBEYS = 23  # worker → leader: the name of the leader that the worker obeys instead of this one; empty: this one
    REFUSED = 24  # worker → leader: it obeys another leader, which has not assigned this stage (text)
    FRAMES = 11  # between leader and frontend: one or several messages (see multiworld_serving.server.frontends.link)
    FETCH_ROWS = 12  # consumer → producer, on an edge: send these rows (see multiworld_serving.common.wire.inputs)
    TAKE_ROWS = 13  # the same, and nobody else needs these rows
    ROWS = 14  # producer → consumer: the rows
    GONE = 15  # producer → consumer: at least one of the rows is not here any more
    INPUTS = 16  # leader → worker: references of the input for an assigned stage (BatchInputs)
    KEPT = 17  # worker → leader: the output for a batch of INPUTS stays at the worker, int64 [its id, *shape of a row]
    INPUT_LOST = 18  # worker → leader: the input of a batch of INPUTS could not be fetched (LostInput as JSON)
    RELEASE = 19  # leader → worker: these outputs are not needed any more (int64 [N])


@dataclass(frozen=True, slots=True)
class RowShape:
    """The shape of a row of a stage's input or output.

    Attributes:
        dims: the shape; if it varies, one number: most bytes of a row.
        varies: the rows of a batch have equal lengths, which other batches may not have.
    """

    dims: tuple[int, ...]
    varies: bool = False

    def accepts(self, shape: tuple[int, ...]) -> bool:
        """Whether a row may have this shape."""
        if self.varies:
            return len(shape) == 1 and 0 < shape[0] <= self.dims[0]
        return shape == self.dims

    def __str__(self) -> str:
        return f"at most {self.dims[0]} bytes" if self.varies else str(self.dims)


@dataclass(slots=True)
class Message:
    """A message.

    Attributes:
        batch: number of the batch; 0 if the message concerns none.
        payload: a tensor of up to 4 dimensions and a known dtype; text and bytes are uint8 [N]. None and an empty tensor are distinct.
        compute_ns, waited_us: of RESULT, how long the worker computed, and how long the batch waited before.
        stage, version: stage and model version that the message refers to.
        dtype, shape: of the payload, also while it has not arrived yet; the shape is None if there is no payload.
    """

    kind: MessageKind
    batch: int = 0
    payload: Tensor | None = None
    compute_ns: int = 0
    waited_us: int = 0
    stage: int = 0
    version: int = 0
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.payload is not None:
            self.dtype, self.shape = self.payload.dtype, tuple(self.payload.shape)

    @staticmethod
    def from_text(kind: MessageKind, text: str, *, batch: int = 0, stage: int = 0, version: int = 0) -> "Message":
        return Message(kind, batch, bytes_tensor(text.encode()), stage=stage, version=version)

    def reply(self, kind: MessageKind, text: str | None = None) -> "Message":
        """A message about the same batch, stage and version."""
        payload = None if text is None else bytes_tensor(text.encode())
        return Message(kind, self.batch, payload, stage=self.stage, version=self.version)

    def text(self) -> str:
        """The payload as text. Raises WireError if it is not text."""
        self.require_text()
        assert self.payload is not None, "it has arrived"
        return bytes(self.payload.numpy()).decode(errors="replace")

    def reason(self) -> str:
        """The payload as an error text: one line, truncated for logs, traces and responses. Raises WireError if it is not text."""
        return one_line(self.text())

    def header(self) -> bytes:
        """Encode the header. Raises ValueError if the payload cannot be encoded."""
        shape = self.shape or ()
        if self.dtype not in _CODES:
            raise ValueError(f"cannot send {self.dtype}; expected one of {', '.join(map(str, _DTYPES))}")
        if len(shape) > MAX_DIMS:
            raise ValueError(f"cannot send {len(shape)} dimensions; expected at most {MAX_DIMS}")
        dims = shape + (0,) * (MAX_DIMS - len(shape))
        return _LAYOUT.pack(
            *(_MAGIC, self.kind, _CODES[self.dtype] << 4 | len(shape), self.stage),
            *(self.batch, self.compute_ns, min(self.waited_us, _MOST_US), self.version, *dims),
        )

    @staticmethod
    def parse(data: bytes, size: int) -> "Message":
        """Decode the header of a message whose payload has `size` bytes and follows. Raises WireError if it is inconsistent."""
        magic, kind, form, stage, batch, compute_ns, waited_us, version, *dims = _LAYOUT.unpack(data)
        code, ndim = form >> 4, form & 15
        if magic != _MAGIC:
            raise WireError(f"not a message of this version (it begins with {data[:16]!r})")
        try:
            known, dtype = MessageKind(kind), _DTYPES[code]
        except (ValueError, IndexError) as error:
            raise WireError(f"unknown kind {kind} or dtype {code}") from error
        if ndim > MAX_DIMS or any(dims[ndim:]):
            raise WireError(f"{known.name} with {ndim} dimensions of {dims}")
        shape: tuple[int, ...] | None = tuple(dims[:ndim])
        if (code, ndim, size) == (0, 0, 0):  # no payload; a tensor without dimensions has one element, so size > 0
            shape = None
        elif size != math.prod(dims[:ndim]) * dtype.itemsize:
            raise WireError(f"{known.name}: {size} bytes are not {dtype} {shape}")
        return Message(known, batch, None, compute_ns, waited_us, stage, version, dtype, shape)

    def require_batch(self, dtype: torch.dtype, row_shape: tuple[int, ...] | RowShape, least: int, most: int) -> None:
        """Raise WireError unless the payload has this dtype and `least` to `most` rows of this shape."""
        rows = row_shape if isinstance(row_shape, RowShape) else RowShape(row_shape)
        shape = self.shape
        if shape and self.dtype == dtype and rows.accepts(shape[1:]) and least <= shape[0] <= most:
            return
        count = least if least == most else f"{least} to {most}"
        found = "no payload" if shape is None else f"{self.dtype} {shape}"
        raise WireError(f"{self.kind.name}: expected {dtype}, {count} rows of {rows}, got {found}")

    def require_text(self) -> None:
        """Raise WireError unless the payload is text of at most MAX_TEXT_BYTES."""
        self.require_batch(torch.uint8, (), 0, MAX_TEXT_BYTES)

    def require_no_payload(self) -> None:
        """Raise WireError if there is a payload."""
        if self.shape is not None:
            raise WireError(f"{self.kind.name}: expected no payload, got {self.dtype} {self.shape}")


def bytes_tensor(data: bytes) -> Tensor:
    """uint8 [N] over a copy of `data`."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
