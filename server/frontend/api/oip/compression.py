"""Compression of request and response bodies: gzip and deflate (zlib format, RFC 9110)."""

from __future__ import annotations

import zlib

from multiworld_serving.common.service.errors import BodyTooLargeError, InferenceRequestError, MediaTypeError

_WINDOW_BITS = {"gzip": 31, "deflate": 15}
_LEVEL = 1
"""Fastest: responses are short, and the leader's CPU time is scarce."""


def content_encoding(header: str | None) -> str | None:
    """The compression named by Content-Encoding; None = uncompressed.

    Raises:
        MediaTypeError: not supported.
    """
    encoding = (header or "").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in _WINDOW_BITS:
        raise MediaTypeError(f"the content encoding {encoding[:64]!r} is not supported; send gzip, deflate or none")
    return encoding


def accepted_encoding(header: str | None) -> str | None:
    """The first supported compression in Accept-Encoding; None = send the response uncompressed."""
    for part in (header or "").lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        if name in _WINDOW_BITS and not any(_refuses(parameter) for parameter in parameters):
            return name
    return None


def _refuses(parameter: str) -> bool:
    name, _, quality = parameter.partition("=")
    return name.strip() == "q" and quality.strip().strip("0.") == ""


def unpack(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decompress a body. Never allocates more than `max_bytes` for it.

    Raises:
        BodyTooLargeError: larger than `max_bytes`.
        InferenceRequestError: not in the format `encoding`, truncated, or more than one member.
    """
    unpacker = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        unpacked = unpacker.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InferenceRequestError(
            f"the body is not {encoding}, which its Content-Encoding declares ({error})"
        ) from error
    if len(unpacked) > max_bytes:
        raise BodyTooLargeError(
            f"the decompressed body is larger than the limit of {max_bytes} bytes; send a smaller one"
        )
    if not unpacker.eof:
        raise InferenceRequestError(f"the {encoding} body is truncated; send all of it")
    if unpacker.unused_data:  # further gzip members, which no client sends: thousands of them would take minutes
        raise InferenceRequestError(f"bytes follow the end of the {encoding} body; send one compressed stream")
    return unpacked


def pack(body: bytes, encoding: str) -> bytes:
    """Compress a body."""
    packer = zlib.compressobj(_LEVEL, wbits=_WINDOW_BITS[encoding])
    return packer.compress(body) + packer.flush()
