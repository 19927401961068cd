"""The frames that members send each other on a peer connection. Each has a head of fixed length; the bytes of a MESSAGE follow its head."""

import functools
import struct
from dataclasses import dataclass

from multiworld.ops.operation import Message

HEAD = struct.Struct("!B3xIQ48sQQ")
"""Kind, tag, number of bytes that follow, the signature of the message, and for a message in place its lease and its offset in bytes."""
RECV_READY = 1
"""Kind of a head that grants one receive credit: the receiver waits for one message with this tag."""
MESSAGE = 2
"""Kind of a head that is followed by the bytes of a message."""

# The other kinds are used between members on one host only; see multiworld/transport/shared.py.
RING = 3
"""Passes the descriptor of the sender's ring; the number is its size in bytes."""
IN_RING = 4
"""Announces a message, like MESSAGE, whose bytes are in the ring and follow in pieces."""
PIECE = 5
"""The next piece of the message is in the next slot of the ring. All pieces have the size of a slot, except the last of a message."""
PIECE_DONE = 6
"""The receiver has copied the next piece."""
IN_PLACE = 7
"""Announces a message, like MESSAGE, whose bytes are in the segment of the descriptor that the frame passes, at its offset."""
RELEASE = 8
"""The receiver has released the lease of a message in place."""

_SIGNATURE_BYTES = 48


@functools.lru_cache(256)
def encode_signature(signature: str, size_bytes: int = _SIGNATURE_BYTES) -> bytes:
    """Encode a signature to a fixed length, by default that of a head."""
    encoded = signature.encode().ljust(size_bytes, b"\0")
    assert len(encoded) == size_bytes
    return encoded


def decode_signature(encoded: bytes) -> str:
    return encoded.rstrip(b"\0").decode(errors="replace")


def pack_head(kind: int, tag: int = 0, size_bytes: int = 0, signature: bytes = b"", lease: int = 0) -> bytes:
    """Return a head of this kind. Its other fields are those of `HEAD`."""
    return HEAD.pack(kind, tag, size_bytes, signature, lease, 0)


@functools.lru_cache(256)
def message_head(signature: str, tag: int, size_bytes: int) -> bytes:
    """Return the head of a message of `size_bytes` bytes."""
    return pack_head(MESSAGE, tag, size_bytes, encode_signature(signature))


@functools.lru_cache(256)
def credit_head(tag: int) -> bytes:
    """Return a head that grants one receive credit for `tag`."""
    return pack_head(RECV_READY, tag)


@dataclass(slots=True, eq=False)
class Output:
    """Bytes to write.

    Attributes:
        message: completes when the bytes are written.
        joined: the next output must follow directly (head and message).
        fd: descriptor to pass with the bytes; -1 for none.
        in_place: it is an IN_PLACE: `message` is copied instead if the kernel passes no more descriptors.
        to_ring: what remains to be copied into the ring, a piece when a slot is free; None if `data` is written to the socket.
    """

    data: bytes | memoryview
    message: Message | None = None
    joined: bool = False
    fd: int = -1
    in_place: bool = False
    to_ring: memoryview | None = None
