"""The frames that members send each other on a peer connection. Each has a head of fixed length; a message follows its head."""

import functools
import struct

HEAD = struct.Struct("!B3xIQ48s")
"""Kind, tag, number of bytes that follow, and the signature of the message."""
RECV_READY = 1
"""Kind of a head that grants one receive credit: the receiver waits for one message with this tag."""
MESSAGE = 2
"""Kind of a head that is followed by the bytes of a message."""

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
