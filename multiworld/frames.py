"""The words spoken on a lifeline: length-prefixed frames, each a kind and some byte fields. Pure: no socket here."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 1 << 20
"""Longest frame after the handshake. Rendezvous values are some hundred bytes; questions and answers some thousand."""
MAX_HANDSHAKE_BYTES = 1 << 16
"""Longest frame before the other side has proven that it knows the secret."""

_LENGTH = struct.Struct("!I")


class Kind(IntEnum):
    CHALLENGE = 1  # host → guest: version, nonce
    HELLO = 2  # guest → host: body (JSON), nonce, proof
    WELCOME = 3  # host → guest: proof
    REFUSE = 4  # host → guest: reason, b"1" if trying again may help
    START = 5  # host → member: epoch; all ranks are here
    PUT = 6  # either way, relayed to all: key, value
    HEARTBEAT = 7
    GONE = 8  # either way, relayed to all: rank, cause, detail; the world is broken
    LEFT = 9  # either way, relayed to all: rank; no new operations
    SETTLED = 10  # member → host: no operation of ours is pending any more
    DONE = 11  # host → member: all have settled, connections may go
    REPLY = 12  # host → guest: answer, proof


class FrameError(ValueError):
    """Bytes that are no frame: the other side speaks something else, or lies."""


@dataclass(frozen=True, slots=True)
class Frame:
    kind: Kind
    fields: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        """The frame as bytes: length, kind, then each field with its own length."""
        body = bytearray([self.kind])
        for field in self.fields:
            body += _LENGTH.pack(len(field)) + field
        return _LENGTH.pack(len(body)) + bytes(body)


HEARTBEAT_BYTES = Frame(Kind.HEARTBEAT).encode()


def _decode(body: memoryview) -> Frame:
    try:
        kind = Kind(body[0])
    except (ValueError, IndexError) as error:
        raise FrameError(f"unknown frame kind: {error}") from error
    fields, at = [], 1
    while at < len(body):
        if at + 4 > len(body):
            raise FrameError("a field's length is cut off")
        (length,) = _LENGTH.unpack_from(body, at)
        at += 4
        if at + length > len(body):
            raise FrameError("a field is longer than its frame")
        fields.append(bytes(body[at : at + length]))
        at += length
    return Frame(kind, tuple(fields))


class FrameReader:
    """Cuts a byte stream into frames. `limit_bytes` bounds what it holds, whatever the other side claims."""

    def __init__(self, limit_bytes: int = MAX_HANDSHAKE_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()
        self._at = 0  # of this much the frames have been given

    @property
    def holds_part(self) -> bool:
        """Whether a frame has come in part."""
        return len(self._buffer) > self._at

    @property
    def missing_bytes(self) -> int:
        """How many, at the least, have to come before the next frame is whole."""
        held = len(self._buffer) - self._at
        return 4 - held if held < 4 else 4 + int(_LENGTH.unpack_from(self._buffer, self._at)[0]) - held

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take what arrived and give the frames that are whole by now. Raises FrameError on garbage."""
        self._forget_given()
        self._buffer += data
        while len(self._buffer) >= self._at + 4:
            (length,) = _LENGTH.unpack_from(self._buffer, self._at)
            if length > self.limit_bytes:
                raise FrameError(f"a frame of {length} bytes, at most {self.limit_bytes} are allowed")
            end = self._at + 4 + length
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                frame = _decode(view[self._at + 4 : end])
            self._at = end
            yield frame
        self._forget_given()

    def _forget_given(self) -> None:
        """All at once: one by one, a read of many short frames would take a hundred times as long."""
        del self._buffer[: self._at]
        self._at = 0
