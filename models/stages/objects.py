"""The objects that travel between stages in Python, as bytes: msgpack, with tensors beside it. Nothing is pickled.

A row begins with its length and that of its msgpack part, 8 bytes each. The data of tensors follow, aligned for reading in place.
The rows of a batch are a tensor uint8 [rows, bytes]; shorter rows end in zeros.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

from multiworld_serving.models.bundle.manifest import TensorSpec
from multiworld_serving.models.bundle.nodes import BATCH
from multiworld_serving.models.bundle.rows import RowFormat
from multiworld_serving.models.errors import BundleError
from multiworld_serving.models.stages.api import InvalidInput, Request, Response

_HEAD = struct.Struct("<QQ")
_ALIGNED_BYTES = 64
MAX_ROW_BYTES = 1 << 27
"""Longest row."""
MAX_BATCH_BYTES = 1 << 30
"""Most bytes of the rows of a batch, which all take as many as the longest one. A larger batch fails, and its rows are computed alone."""
_SHARED_BATCH_BYTES = 1 << 20
"""Longer rows share batches only with rows of a similar length."""
_TENSOR, _ARRAY, _INVALID, _REQUEST, _RESPONSE, _STEP = range(1, 7)
_DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
CANCELLED = InvalidInput("the request was cancelled")
_EXPECTED = "None, bool, int, float, str, bytes, list, dict, numpy arrays of numbers and torch tensors can be sent"


_Action = Literal["open", "next", "close"]


class ObjectError(BundleError):
    """An object cannot be sent, or bytes are not an object."""


@dataclass(frozen=True, slots=True)
class StreamStep:
    """A row of a stream: see `streams.py`.

    Attributes:
        stream: its id.
        action: "open" passes all stages. The last stage keeps the stream for "next" and "close".
        position: number of chunks that the frontend has.
        idle_s: seconds without a step after which the stream is dropped.
        row: of "open": what the stage gets.
        sent: of "open": the chunks that the client has, for `resume`.
    """

    stream: str
    action: _Action
    position: int = 0
    idle_s: float = 0.0
    row: Any = None
    sent: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class EncodedObject:
    """An object as bytes, not yet in one piece.

    Attributes:
        size: of the row that it becomes.
    """

    text: bytes
    data: list[tuple[int, memoryview]]
    size: int

    def write(self, row: memoryview) -> None:
        """Write it to the beginning of a row; the rest of the row becomes zeros."""
        start = _aligned(_HEAD.size + len(self.text))
        _HEAD.pack_into(row, 0, self.size, len(self.text))
        row[_HEAD.size : _HEAD.size + len(self.text)] = self.text
        end = _HEAD.size + len(self.text)
        for at, data in self.data:
            row[end : start + at] = bytes(start + at - end)
            end = start + at + len(data)
            row[start + at : end] = data
        row[end:] = bytes(len(row) - end)


class _Encoding:
    """Collects the data of the tensors of one object."""

    def __init__(self) -> None:
        self.data: list[tuple[int, memoryview]] = []
        self._end = 0

    def encode(self, value: object) -> bytes:
        if isinstance(value, StreamStep):  # msgspec would make a map of it
            parts = [value.stream, value.action, value.position, value.idle_s, value.row, value.sent]
            value = msgspec.msgpack.Ext(_STEP, self.encode(parts))
        return msgspec.msgpack.encode(value, enc_hook=self._hook)

    def _hook(self, value: object) -> object:
        if isinstance(value, Tensor):
            return msgspec.msgpack.Ext(_TENSOR, self._tensor(value))
        if isinstance(value, np.ndarray):
            if value.dtype.name not in _DTYPES or not value.dtype.isnative:
                raise ObjectError(f"an array of {value.dtype} cannot be sent; {_EXPECTED}")
            flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            return msgspec.msgpack.Ext(_ARRAY, self._add(flat.data, value.dtype.name, value.shape))
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, InvalidInput):
            return msgspec.msgpack.Ext(_INVALID, str(value).encode("utf-8", "replace"))
        if isinstance(value, Request):
            body = np.frombuffer(value.body, dtype=np.uint8)  # beside the msgpack part
            parts = [body, value.content_type, dict(value.query), dict(value.headers), dict(value.inputs)]
            return msgspec.msgpack.Ext(_REQUEST, self.encode(parts))
        if isinstance(value, Response):
            parts = [value.body, value.content_type, value.status, dict(value.headers)]
            return msgspec.msgpack.Ext(_RESPONSE, self.encode(parts))
        raise ObjectError(f"an object of the type {type(value).__name__} cannot be sent; {_EXPECTED}")

    def _tensor(self, tensor: Tensor) -> bytes:
        if tensor.layout != torch.strided or tensor.dtype not in _NAMES:
            raise ObjectError(f"a tensor of {tensor.dtype} with the layout {tensor.layout} cannot be sent; {_EXPECTED}")
        flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
        return self._add(flat.view(torch.uint8).numpy().data, _NAMES[tensor.dtype], tuple(tensor.shape))

    def _add(self, data: memoryview, dtype: str, shape: tuple[int, ...]) -> bytes:
        at = self._end
        self.data.append((at, data))
        self._end = _aligned(at + len(data))
        return msgspec.msgpack.encode((dtype, shape, at))


def encode(value: object) -> EncodedObject:
    """Encode an object. Raises ObjectError if its type or size is not supported."""
    encoding = _Encoding()
    try:
        text = encoding.encode(value)
    except ObjectError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ObjectError(f"the object cannot be sent: {str(error)[:200]}; {_EXPECTED}") from error
    end = _HEAD.size + len(text)
    if encoding.data:
        at, data = encoding.data[-1]
        end = _aligned(end) + at + len(data)
    if end > MAX_ROW_BYTES:
        raise ObjectError(f"an object has {end} bytes; at most {MAX_ROW_BYTES} can be sent")
    return EncodedObject(text, encoding.data, end)


def decode(row: memoryview) -> Any:
    """The object of a row, writable; its arrays share the memory of the row. Raises ObjectError for bytes that are no object."""
    text, data = _parts(row)

    def hook(code: int, content: memoryview) -> object:
        if code in (_TENSOR, _ARRAY):
            name, shape, at = msgspec.msgpack.decode(content, type=tuple[str, tuple[int, ...], int])
            tensor = _tensor_of(data, name, shape, at)
            return tensor if code == _TENSOR else tensor.numpy()
        if code == _INVALID:
            return InvalidInput(str(content, "utf-8"))
        if code not in (_REQUEST, _RESPONSE, _STEP):
            raise ObjectError(f"an object of the unknown type {code}")
        parts = msgspec.msgpack.decode(content, ext_hook=hook)
        if code == _RESPONSE:
            return Response(*msgspec.convert(parts, tuple[bytes, str, int, dict[str, str]]))
        if code == _STEP:
            return StreamStep(*msgspec.convert(parts[:4], tuple[str, _Action, int, float]), *parts[4:])
        if not isinstance(parts, list) or len(parts) != 5 or not isinstance(parts[0], np.ndarray):
            raise ObjectError("a request without its parts")
        return Request(
            parts[0].tobytes(), *msgspec.convert(parts[1:], tuple[str, dict[str, str], dict[str, str], dict[str, Any]])
        )

    try:
        return msgspec.msgpack.decode(text, ext_hook=hook)
    except ObjectError:
        raise
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise ObjectError(f"a row is not an object: {str(error)[:200]}") from error


def _parts(row: memoryview) -> tuple[memoryview, memoryview]:
    """The msgpack part of a row, and the data of its tensors. Raises ObjectError."""
    if len(row) < _HEAD.size:
        raise ObjectError(f"a row has {len(row)} bytes; expected at least {_HEAD.size}")
    size, text_bytes = _HEAD.unpack_from(row)
    if not _HEAD.size + text_bytes <= size <= len(row):
        raise ObjectError(f"a row of {len(row)} bytes announces {text_bytes} of {size} bytes")
    return row[_HEAD.size : _HEAD.size + text_bytes], row[min(_aligned(_HEAD.size + text_bytes), size) : size]


def _tensor_of(data: memoryview, name: str, shape: tuple[int, ...], at: int) -> Tensor:
    dtype = _DTYPES.get(name)
    if dtype is None or min(shape, default=0) < 0 or len(shape) > 64:
        raise ObjectError(f"a tensor of {name!r:.20} {shape!s:.100}")
    size = math.prod(shape) * dtype.itemsize
    if at < 0 or at % _ALIGNED_BYTES or at + size > len(data):
        raise ObjectError(f"a tensor of {size} bytes at {at} of {len(data)} bytes")
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data[at : at + size], dtype=dtype).view(shape)


def _aligned(size: int) -> int:
    return size + -size % _ALIGNED_BYTES


def rows_of(objects: Sequence[EncodedObject], allocate: Callable[..., Tensor] | None = None) -> Tensor:
    """The rows of a batch: uint8 [rows, bytes]. Raises ObjectError if they have more than `MAX_BATCH_BYTES`.

    Args:
        allocate: makes the memory of a shape and dtype; None: any memory.
    """
    width = _aligned(max(each.size for each in objects))
    if len(objects) > 1 and len(objects) * width > MAX_BATCH_BYTES:
        raise ObjectError(f"{len(objects)} rows of up to {width} bytes; a batch has at most {MAX_BATCH_BYTES}")
    shape = (len(objects), width)
    rows = torch.empty(shape, dtype=torch.uint8) if allocate is None else allocate(shape, torch.uint8)
    data = rows.numpy().reshape(-1).data
    for index, each in enumerate(objects):
        each.write(data[index * width : (index + 1) * width])
    return rows


class ObjectRows(RowFormat):
    """How objects travel: packed rows of any length, which may differ within a batch."""

    max_row_bytes = MAX_ROW_BYTES

    def accepts(self, row_shape: tuple[int, ...]) -> bool:
        """Whether rows may have this shape."""
        return len(row_shape) == 1 and _HEAD.size <= row_shape[0] <= MAX_ROW_BYTES

    def key(self, rows: Tensor) -> str:
        """Text that is equal for rows that can be in one batch."""
        width = rows.shape[1]
        return "" if width <= _SHARED_BATCH_BYTES else f"{math.frexp(width)[1]}"

    def decoded(self, rows: Tensor) -> list[Any]:
        """The object of each row; `CANCELLED` for a row of zeros, which belongs to a request that was cancelled. Raises ObjectError."""
        return [CANCELLED if each is None else decode(each) for each in self._parts(rows)]

    def unpack(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The rows. Raises ObjectError if one of them is shorter than it says."""
        for each in self._parts(rows):
            if each is not None:
                _parts(each)
        return (rows,)

    def _parts(self, rows: Tensor) -> list[memoryview | None]:
        """The bytes of each row; None for a row of zeros."""
        if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] < _HEAD.size:
            raise ObjectError(f"objects as {rows.dtype} {list(rows.shape)}; expected uint8 [rows, bytes]")
        data, width = rows.contiguous().numpy().reshape(-1).data, rows.shape[1]
        found = (data[at : at + width] for at in range(0, len(data), width))
        return [each if any(each[: _HEAD.size]) else None for each in found]


OBJECT_ROWS = ObjectRows((TensorSpec("object", "uint8", (BATCH, "bytes")),), {"bytes": (_HEAD.size, MAX_ROW_BYTES)})
