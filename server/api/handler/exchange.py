"""What a frontend and a handler's process send each other: messages with a kind and content, and arrays as bytes."""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np

_HEAD = struct.Struct("!BQ")
_LENGTH = struct.Struct("!I")
MAX_BYTES = 1 << 28
"""Largest message."""
_MAX_ARRAYS = 64
_MAX_DIMS = 8
_DTYPES = frozenset(
    ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
)


class Kind(IntEnum):
    """What a message contains."""

    DECODE = 1
    """To the handler: content type and body. Reply: RESULT with arrays."""
    ENCODE = 2
    """To the handler: arrays. Reply: RESULT with content type and body."""
    RESULT = 3
    """From the handler; the first one, without content, says that it is loaded."""
    INVALID = 4
    """From the handler: it raised ValueError; the text is for the client."""
    FAILED = 5
    """From the handler: another error, as text for the log."""


def send(sock: socket.socket, kind: Kind, content: bytes) -> None:
    """Send a message. Raises OSError; TimeoutError after the socket's timeout."""
    sock.sendall(_HEAD.pack(kind, len(content)) + content)


def receive(sock: socket.socket) -> tuple[Kind, bytes]:
    """Receive a message. Raises EOFError at the end of the connection, ValueError for an invalid message, OSError."""
    kind, size = _HEAD.unpack(_exactly(sock, _HEAD.size))
    if size > MAX_BYTES:
        raise ValueError(f"a message of {size} bytes; expected at most {MAX_BYTES}")
    return Kind(kind), _exactly(sock, size)


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(min(size - len(data), 1 << 20))
        if not chunk:
            raise EOFError("the connection has ended")
        data += chunk
    return bytes(data)


def pack_text(text: str, content: bytes) -> bytes:
    """A text and bytes after it."""
    encoded = text.encode()
    return _LENGTH.pack(len(encoded)) + encoded + content


def unpack_text(data: bytes) -> tuple[str, bytes]:
    """The inverse of `pack_text`. Raises ValueError or struct.error."""
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    if end > len(data):
        raise ValueError("a text is longer than its message")
    return data[_LENGTH.size : end].decode(), data[end:]


def pack_arrays(arrays: Mapping[str, Any]) -> bytes:
    """Arrays by name. Raises TypeError for what is not an array of numbers or booleans."""
    found = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in arrays.items()}
    for name, array in found.items():
        if not isinstance(name, str) or array.dtype.name not in _DTYPES or array.ndim > _MAX_DIMS:
            raise TypeError(
                f"{name!r:.60} is an array of {array.dtype}, {array.ndim} dimensions; expected numbers or booleans"
            )
    head = json.dumps([[name, array.dtype.name, array.shape] for name, array in found.items()])
    return pack_text(head, b"".join(array.tobytes() for array in found.values()))


def unpack_arrays(data: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """The inverse of `pack_arrays`. Raises ValueError, TypeError or struct.error if it is invalid."""
    head, content = unpack_text(data)
    described, found, at = json.loads(head), {}, 0
    if len(described) > _MAX_ARRAYS:
        raise ValueError(f"{len(described)} arrays; expected at most {_MAX_ARRAYS}")
    for name, dtype, shape in described:
        if dtype not in _DTYPES or len(shape) > _MAX_DIMS or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError(f"{name!r:.60} is not a valid array")
        end = at + math.prod(shape) * np.dtype(dtype).itemsize
        if end > len(content):
            raise ValueError(f"the values of {name!r:.60} are missing")
        found[str(name)] = np.frombuffer(content[at:end], dtype=dtype).reshape(shape).copy()
        at = end
    return found
