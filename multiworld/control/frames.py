"""The frames of a control connection: length-prefixed, each with a kind and any number of byte fields. Does no I/O."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

PROTOCOL_VERSION = 6
MAX_FRAME_BYTES = 1 << 20
"""Longest frame after the handshake. Rendezvous values have some hundred bytes."""
MAX_HANDSHAKE_BYTES = 1 << 16
"""Longest frame before the peer is authenticated, and longest query and reply."""

_LENGTH = struct.Struct("!I")


class Kind(IntEnum):
    CHALLENGE = 1  # server → client: version, nonce
    HELLO = 2  # client → server: body (JSON), nonce, proof
    WELCOME = 3  # server → client: proof
    REFUSE = 4  # server → client: reason, b"1" if a retry may succeed
    START = 5  # rank 0 → member: generation, roster (JSON); all ranks have joined
    STORE_SET = 6  # both ways, relayed to all: key, value
    HEARTBEAT = 7  # both ways: the sender's event loop count, if it has one (see progress.py)
    MEMBER_FAILED = 8  # both ways, relayed to all: rank, cause, detail; the world is broken
    LEFT = 9  # both ways, relayed to all: rank; it starts no more operations
    REPLY = 12  # server → client: answer, proof


class FrameError(ValueError):
    """The received bytes are not a valid frame, or the frame is not valid here."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    fields: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        """Return length, kind, then each field with its length. Lengths are 4 bytes, big-endian."""
        body = bytearray([self.kind])
        for field in self.fields:
            body += _LENGTH.pack(len(field)) + field
        return _LENGTH.pack(len(body)) + bytes(body)


HEARTBEAT_BYTES = Frame(Kind.HEARTBEAT).encode()


def decode_frame(body: bytes | bytearray) -> Frame:
    """Decode a frame without its length. Raises FrameError."""
    try:
        kind = Kind(body[0])
    except (ValueError, IndexError) as error:
        raise FrameError(f"unknown frame kind: {error}") from error
    fields, at = [], 1
    while at < len(body):
        if at + 4 > len(body):
            raise FrameError("the length of a field is incomplete")
        (length,) = _LENGTH.unpack_from(body, at)
        at += 4
        if at + length > len(body):
            raise FrameError("a field is longer than its frame")
        fields.append(bytes(body[at : at + length]))
        at += length
    return Frame(kind, tuple(fields))


def decode_length(data: bytes | bytearray, limit_bytes: int, at: int = 0) -> int:
    """The length of the frame that begins at `at`. Raises FrameError when it exceeds the limit."""
    length = int(_LENGTH.unpack_from(data, at)[0])
    if length > limit_bytes:
        raise FrameError(f"a frame of {length} bytes; at most {limit_bytes} are allowed")
    return length


class FrameReader:
    """Splits a byte stream into frames. A frame longer than `limit_bytes` is an error, raised when its length is received."""

    def __init__(self, limit_bytes: int = MAX_HANDSHAKE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add received bytes and yield the complete frames. Raises FrameError."""
        self._buffer += data
        at = 0
        try:
            while len(self._buffer) >= at + 4:
                end = at + 4 + decode_length(self._buffer, self._limit_bytes, at)
                if len(self._buffer) < end:
                    break
                frame = decode_frame(self._buffer[at + 4 : end])
                at = end
                yield frame
        finally:  # in one step: deleting each frame takes about 100 times as long for many short frames
            del self._buffer[:at]
