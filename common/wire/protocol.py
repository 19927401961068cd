"""The messages of a link, as bytes.

A message is a header of fixed length, a body as JSON, which is one of the types of the link's `Protocol`, and a payload.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from multiworld.texts import one_line

_HEAD = struct.Struct("!BQII7x")
"""Kind, number, bytes of JSON, bytes of payload. Headers and payloads start at a multiple of `_ALIGNED_BYTES`."""
_ALIGNED_BYTES = 64
_MAX_ERROR_CHARS = 200
Reply = tuple[Any, bytes | memoryview]
"""Body and payload."""


class WireError(ValueError):
    """The peer sent something that no process of this version sends."""


def _encode_tensor(value: object) -> None:
    """A tensor is not in the JSON: its rows are the payload."""
    if not isinstance(value, Tensor):
        raise NotImplementedError(f"a message with a {type(value).__name__}")


def _decode_tensor(_type: type, _value: object) -> Tensor:
    return torch.empty(0)


_ENCODER = msgspec.json.Encoder(enc_hook=_encode_tensor)


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The body of a message. Its class is the tag `type`."""


class Failure(Body, frozen=True):
    """A reply that is an exception."""

    def error(self) -> Exception:
        """The exception."""
        raise NotImplementedError


class Protocol:
    """What the two ends of a link say to each other.

    Args:
        bodies: a union of subclasses of `Body`.
        failure: turns an exception into a reply, and logs unexpected exceptions.

    Attributes:
        bodies: decodes the body of a message.
    """

    def __init__(self, bodies: Any, failure: Callable[[Exception], Failure]) -> None:
        self.bodies: msgspec.json.Decoder[Any] = msgspec.json.Decoder(bodies, dec_hook=_decode_tensor)
        self.failure = failure

    def decode(self, data: memoryview) -> Iterator[Received]:
        """The messages of one transfer. Raises ValueError if it is invalid."""
        at = 0
        while at < len(data):
            if len(data) - at < _HEAD.size:
                raise ValueError("a message ends in its header")
            kind, number, text_bytes, payload_bytes = _HEAD.unpack_from(data, at)
            text = at + _HEAD.size
            end = text + text_bytes + payload_bytes
            if end > len(data):
                raise ValueError(f"a message of {text_bytes} + {payload_bytes} bytes is longer than its transfer")
            body = None
            if kind != Kind.CANCEL:
                try:
                    body = self.bodies.decode(data[text : text + text_bytes])
                except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                    detail = one_line(str(error), _MAX_ERROR_CHARS)
                    raise ValueError(f"{detail}; do both sides run the same release?") from error
            yield Received(Kind(kind), number, body, data[text + text_bytes : end])
            at = end + -end % _ALIGNED_BYTES


class Kind(IntEnum):
    """What a message is for."""

    MESSAGE = 1
    """With a number, a reply is expected."""
    STEP = 2
    """Comes before the reply."""
    REPLY = 3
    CANCEL = 4
    """The reply with this number is not needed any more."""


class Received(NamedTuple):
    """A received message.

    Attributes:
        body: None in a CANCEL.
        payload: writable; not shared with other messages.
    """

    kind: Kind
    number: int
    body: Any
    payload: memoryview = memoryview(b"")


def encode(kind: Kind, number: int = 0, body: Any = None, payload: bytes | memoryview = b"") -> bytearray:
    """One message, padded so that the next one is aligned."""
    text = b"" if body is None else _ENCODER.encode(body)
    text += b" " * (-(_HEAD.size + len(text)) % _ALIGNED_BYTES)
    data = bytearray(_HEAD.pack(kind, number, len(text), len(payload)))
    data += text
    data += payload
    data += bytes(-len(data) % _ALIGNED_BYTES)
    return data


def rows_payload(rows: Tensor) -> memoryview:
    """The bytes of rows [N, …], as a payload."""
    return rows.contiguous().view(-1).view(torch.uint8).numpy().data


def rows_of_payload(payload: memoryview, count: int, dtype: torch.dtype, row_shape: tuple[int, ...]) -> Tensor:
    """The inverse of `rows_payload`, sharing memory with `payload`. Raises WireError if it is not `count` rows of this shape."""
    expected = count * math.prod(row_shape) * dtype.itemsize
    if len(payload) != expected:
        raise WireError(f"{count} rows of {dtype} {row_shape} have {len(payload)} bytes; expected {expected}")
    if not expected:
        return torch.empty((count, *row_shape), dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype).view(count, *row_shape)
