"""The frames that members send each other on a peer connection. Each has a head of fixed length; the bytes of a MESSAGE follow its head."""

import functools
import struct
from dataclasses import dataclass

from multiworld.ops.operation import Message

HEAD = struct.Struct("!B3xIQ48s")
"""Kind, tag, number of bytes that follow, and the signature of the message."""
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
PLACE = 7
"""Passes a descriptor for the next IN_PLACE message. The number is that of the lease; the field the offset in bytes (`NUMBERS`)."""
IN_PLACE = 8
"""Announces a message, like MESSAGE, whose bytes are in the segment of the preceding PLACE."""
RELEASE = 9
"""The number is that of a lease that the receiver has released."""
NUMBERS = struct.Struct("!Q40x")
"""The field of PLACE."""

_SIGNATURE_BYTES = 48


@functools.lru_cache(256)
def encode_signature(signature: str, size_bytes: int = _SIGNATURE_BYTES) -> bytes:
    """Encode a signature to a fixed length, by default that of a head."""
    encoded = signature.encode().ljust(size_bytes, b"\0")
    assert len(encoded) == size_bytes
    return encoded


def decode_signature(encoded: bytes) -> str:
    return encoded.rstrip(b"\0").decode(errors="replace")


@functools.lru_cache(256)
def message_head(signature: str, tag: int, size_bytes: int) -> bytes:
    """The head of a message of `size_bytes` bytes."""
    return HEAD.pack(MESSAGE, tag, size_bytes, encode_signature(signature))


@functools.lru_cache(256)
def credit_head(tag: int) -> bytes:
    """A head that grants one receive credit for `tag`."""
    return HEAD.pack(RECV_READY, tag, 0, b"")


@dataclass(slots=True, eq=False)
class Output:
    """Bytes to write.

    Attributes:
        message: completes when the bytes are written.
        joined: the next output must follow directly (head and message).
        fd: descriptor to pass with the bytes; -1 for none.
        in_place: for the PLACE of a message: the message, which is copied if the kernel passes no more descriptors.
    """

    data: bytes | memoryview
    message: Message | None = None
    joined: bool = False
    fd: int = -1
    in_place: Message | None = None
