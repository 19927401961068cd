"""One message between leader and worker: a header of fixed size, then a payload of exactly the bytes that it promises.

Gloo ends a process that receives more than it has posted, so nothing is ever received whose size was not agreed first. The header
is checked before a byte of memory is taken for its payload.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

HEADER_BYTES = 64
MAX_DIMS = 5
_MAGIC = 0x4D574233  # "MWB3": multiworld batch, version 3
_LAYOUT = struct.Struct("!IBBBBQQQQI5I")
assert _LAYOUT.size == HEADER_BYTES

_DTYPES = (torch.uint8, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class WireError(ValueError):
    """The other side sent what no leader or worker of this version sends."""


class Kind(IntEnum):
    ORDER = 1  # leader → worker: the stage to serve (StageOrder as JSON)
    WEIGHTS = 2  # leader → worker: a piece of the stage's weights (safetensors)
    READY = 3  # worker → leader: loaded and warmed up (JSON, what it is)
    BATCH = 4  # leader → worker: the input of a stage that was ordered before
    RESULT = 5  # worker → leader
    FAILED = 6  # worker → leader: the stage raised; the payload says what
    LEAVING = 7  # worker → leader: send nothing new, and close once I have answered everything
    RESTART = 8  # leader → worker: leave, end your process, and let whatever started you start you again
    DROP = 9  # leader → worker: forget the stages of this version
    TRACE = 10  # leader → worker: whose traces the batch of this number, which follows, belongs to (see wire.tracing)


@dataclass(frozen=True, slots=True)
class Message:
    """
    Attributes:
        batch: which batch it is about; 0 where there is none.
        payload: any tensor of up to 5 dimensions and a known dtype; text and bytes travel as uint8 [N].
        compute_ns: how long the worker computed, waited_ns: how long the batch waited there for its turn.
        stage, version: of a batch, which of the stages that the worker holds is to compute it, and of which version of the model;
            of READY, FAILED and DROP, what they are about.
    """

    kind: Kind
    batch: int = 0
    payload: Tensor | None = None
    compute_ns: int = 0
    waited_ns: int = 0
    stage: int = 0
    version: int = 0

    @staticmethod
    def of_text(kind: Kind, text: str, *, batch: int = 0, stage: int = 0, version: int = 0) -> "Message":
        return Message(kind, batch, bytes_tensor(text.encode()), stage=stage, version=version)

    def text(self) -> str:
        """The payload as text. Raises WireError when it is none."""
        if self.payload is None:
            return ""
        if self.payload.dtype != torch.uint8 or self.payload.dim() != 1:
            raise WireError(f"{self.kind.name}: expected text, got {self.payload.dtype} {tuple(self.payload.shape)}")
        return bytes(self.payload.numpy()).decode(errors="replace")

    def header(self) -> Tensor:
        """uint8 [64]."""
        payload = self.payload
        shape = () if payload is None else tuple(payload.shape)
        code = 0 if payload is None else _CODES[payload.dtype]
        size = 0 if payload is None else payload.nbytes
        if len(shape) > MAX_DIMS:
            raise ValueError(f"{len(shape)} dimensions, at most {MAX_DIMS} travel")
        dims = shape + (0,) * (MAX_DIMS - len(shape))
        packed = _LAYOUT.pack(
            *(_MAGIC, self.kind, code, len(shape), self.stage, self.batch, size),
            *(self.compute_ns, self.waited_ns, self.version, *dims),
        )
        return bytes_tensor(packed)


@dataclass(frozen=True, slots=True)
class Header:
    """A header that was received and holds together."""

    kind: Kind
    batch: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    payload_bytes: int
    compute_ns: int
    waited_ns: int
    stage: int
    version: int

    @staticmethod
    def parse(data: Tensor, max_payload_bytes: int) -> "Header":
        """Read uint8 [64]. Raises WireError when it contradicts itself, or promises more than `max_payload_bytes`."""
        magic, kind, code, ndim, stage, batch, size, compute_ns, waited_ns, version, *dims = _LAYOUT.unpack(
            bytes(data.numpy())
        )
        if magic != _MAGIC:
            raise WireError(f"not a message of this version (it begins with {magic:#010x})")
        try:
            known, dtype = Kind(kind), _DTYPES[code]
        except (ValueError, IndexError) as error:
            raise WireError(f"unknown kind {kind} or dtype {code}") from error
        if size > max_payload_bytes:
            raise WireError(f"{known.name} of {size} bytes, at most {max_payload_bytes} are expected")
        if ndim > MAX_DIMS or any(dims[ndim:]):
            raise WireError(f"{known.name} with {ndim} dimensions of {dims}")
        shape = tuple(dims[:ndim])
        elements = 1
        for dim in shape:
            elements *= dim
        if size and size != elements * dtype.itemsize:
            raise WireError(f"{known.name}: {size} bytes are not {dtype} {shape}")
        return Header(known, batch, dtype, shape, size, compute_ns, waited_ns, stage, version)

    def message(self, payload: Tensor | None) -> Message:
        return Message(self.kind, self.batch, payload, self.compute_ns, self.waited_ns, self.stage, self.version)


def bytes_tensor(data: bytes) -> Tensor:
    """uint8 [N] over a copy of `data`."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
