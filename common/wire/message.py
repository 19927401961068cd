"""What travels over a world of two: a header, which travels in the head of the library's message, and a payload.

The header is checked twice before memory is allocated for the payload: `Message.parse` rejects an inconsistent header, and the receiver
rejects a dtype or shape that it does not expect.
"""

import math
import struct
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

MAX_DIMS = 4
_MAGIC = 0xB4
"""First byte of a header of this version. Not ASCII, so that no signature of a tensor begins with it."""
_LAYOUT = struct.Struct("!BBBxQ20x4I")
"""Magic, kind, dtype * 16 + number of dimensions, number, dimensions, and unused bytes.
It is as long as the head of a message of the library."""
HEADER_BYTES = _LAYOUT.size

_DTYPES = (torch.uint8, torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class WireError(ValueError):
    """The peer sent something that no process of this version sends."""


class MessageKind(IntEnum):
    """Types of messages."""

    FRAMES = 11  # on a link: one or several messages (see multiworld_serving.common.wire.link)
    FETCH_ROWS = 12  # consumer → producer, on an edge: send these rows (see multiworld_serving.common.wire.inputs)
    TAKE_ROWS = 13  # the same, and nobody else needs these rows
    ROWS = 14  # producer → consumer: the rows
    GONE = 15  # producer → consumer: at least one of the rows is not here any more


@dataclass(slots=True)
class Message:
    """A message.

    Attributes:
        number: of a fetch, which its response repeats.
        payload: a tensor of up to 4 dimensions and a known dtype; bytes are uint8 [N]. None and an empty tensor are distinct.
        dtype, shape: of the payload, also while it has not arrived yet; the shape is None if there is no payload.
    """

    kind: MessageKind
    number: int = 0
    payload: Tensor | None = None
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.payload is not None:
            self.dtype, self.shape = self.payload.dtype, tuple(self.payload.shape)

    def header(self) -> bytes:
        """Encode the header. Raises ValueError if the payload cannot be encoded."""
        shape = self.shape or ()
        if self.dtype not in _CODES:
            raise ValueError(f"cannot send {self.dtype}; expected one of {', '.join(map(str, _DTYPES))}")
        if len(shape) > MAX_DIMS:
            raise ValueError(f"cannot send {len(shape)} dimensions; expected at most {MAX_DIMS}")
        dims = shape + (0,) * (MAX_DIMS - len(shape))
        return _LAYOUT.pack(*(_MAGIC, self.kind, _CODES[self.dtype] << 4 | len(shape), self.number, *dims))

    @staticmethod
    def parse(data: bytes, size: int) -> "Message":
        """Decode the header of a message whose payload has `size` bytes and follows. Raises WireError if it is inconsistent."""
        magic, kind, form, number, *dims = _LAYOUT.unpack(data)
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
        return Message(known, number, None, dtype, shape)

    def require_batch(self, dtype: torch.dtype, row_shape: tuple[int, ...], least: int, most: int) -> None:
        """Raise WireError unless the payload has this dtype and `least` to `most` rows of this shape."""
        shape = self.shape
        if shape and self.dtype == dtype and shape[1:] == row_shape and least <= shape[0] <= most:
            return
        count = least if least == most else f"{least} to {most}"
        found = "no payload" if shape is None else f"{self.dtype} {shape}"
        raise WireError(f"{self.kind.name}: expected {dtype}, {count} rows of {row_shape}, got {found}")

    def require_no_payload(self) -> None:
        """Raise WireError if there is a payload."""
        if self.shape is not None:
            raise WireError(f"{self.kind.name}: expected no payload, got {self.dtype} {self.shape}")
