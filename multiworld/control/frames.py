"""The frames of a control connection: length-prefixed messages in MessagePack, each with its type. Does no I/O."""

import ipaddress
import struct
from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from multiworld.errors import Cause

PROTOCOL_VERSION = 10
MAX_FRAME_BYTES = 1 << 20
"""Longest frame after the handshake. Rendezvous values have some hundred bytes."""
MAX_HANDSHAKE_BYTES = 1 << 16
"""Longest frame before the peer is authenticated, and longest query and reply."""

_LENGTH = struct.Struct("!I")


class FrameError(ValueError):
    """The received bytes are not a valid frame, or the frame is not valid here."""


class Frame(Struct, frozen=True, array_like=True, tag=True):
    """A message. Fields that a later release appends are ignored."""

    def encode(self) -> bytes:
        """Return the length in 4 bytes, big-endian, then the message."""
        body = msgspec.msgpack.encode(self)
        return _LENGTH.pack(len(body)) + body


class Challenge(Frame, frozen=True):
    """Server → client."""

    version: int
    nonce: bytes


class SignedHello(Frame, frozen=True):
    """Client → server: an encoded `Hello` (see handshake.py)."""

    hello: bytes
    nonce: bytes
    proof: bytes


class Welcome(Frame, frozen=True):
    """Server → client. The answer of a query, else empty."""

    proof: bytes
    answer: bytes = b""


class Refuse(Frame, frozen=True):
    """Server → client. `retry`: another attempt may succeed."""

    reason: str
    retry: bool


class Address(Struct, frozen=True, array_like=True):
    """Where a member accepts data connections: an IP address and a port, and the path of its Unix socket. "" and 0 if it has none."""

    host: str = ""
    port: Annotated[int, Meta(ge=0, lt=65536)] = 0
    local: str = ""

    def __post_init__(self) -> None:
        if self.host:
            ipaddress.ip_address(self.host)  # not a name, so that nothing has to be resolved


class Start(Frame, frozen=True):
    """Rank 0 → member: all ranks have joined.

    Attributes:
        formation: a random name that rank 0 gave this forming of the world; see `Hello`.
        addresses: by rank.
    """

    generation: int
    formation: str
    addresses: tuple[Address, ...]


class StoreSet(Frame, frozen=True):
    """Both ways, relayed to all."""

    key: str
    value: bytes


class Heartbeat(Frame, frozen=True):
    """Both ways. `count` is that of the sender's event loop, if it has one (see loop.py)."""

    count: int | None = None


class MemberFailed(Frame, frozen=True):
    """Both ways, relayed to all: the world is broken."""

    rank: int
    cause: Cause
    detail: str


class Left(Frame, frozen=True):
    """Both ways, relayed to all: this rank starts no more operations."""

    rank: int


HEARTBEAT_BYTES = Heartbeat().encode()
_DECODER = msgspec.msgpack.Decoder(
    Challenge | SignedHello | Welcome | Refuse | Start | StoreSet | Heartbeat | MemberFailed | Left
)


def decode_frame(body: bytes | bytearray) -> Frame:
    """Decode a frame without its length. Raises FrameError."""
    try:
        frame: Frame = _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise FrameError(f"not a frame: {error}") from error
    return frame


def decode_length(data: bytes | bytearray, limit_bytes: int, at: int = 0) -> int:
    """Return the length of the frame that begins at `at`. Raises FrameError when it exceeds the limit."""
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
