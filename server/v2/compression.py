"""Compressed bodies, both ways: gzip and deflate, which is zlib's format by the standard."""

from __future__ import annotations

import zlib

from server.errors import BodyTooLargeError, InferenceRequestError, MediaTypeError

_WINDOW_BITS = {"gzip": 31, "deflate": 15}
_LEVEL = 1
"""Answers are short and the leader's time is dear."""


def content_encoding(header: str | None) -> str | None:
    """How a body is compressed, by its Content-Encoding; None = not at all.

    Raises:
        MediaTypeError: in a way that is not served.
    """
    encoding = (header or "").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in _WINDOW_BITS:
        raise MediaTypeError(f"the content encoding {encoding[:64]!r} is not served; send gzip, deflate or none")
    return encoding


def accepted_encoding(header: str | None) -> str | None:
    """How an answer may be compressed, by the request's Accept-Encoding: the first of ours that the client takes."""
    for part in (header or "").lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        if name in _WINDOW_BITS and not any(_refuses(parameter) for parameter in parameters):
            return name
    return None


def _refuses(parameter: str) -> bool:
    name, _, quality = parameter.partition("=")
    return name.strip() == "q" and quality.strip().strip("0.") == ""


def unpack(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """The body as it was before it was compressed. Never takes memory for more than `max_bytes` of it.

    Raises:
        BodyTooLargeError: it is longer.
        InferenceRequestError: it is not what `encoding` says, cut off, or in several pieces.
    """
    unpacker = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        unpacked = unpacker.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InferenceRequestError(f"the body is not {encoding}, as its Content-Encoding says ({error})") from error
    if len(unpacked) > max_bytes:
        raise BodyTooLargeError(
            f"the body is longer than the limit of {max_bytes} bytes when it is unpacked; send a smaller one"
        )
    if not unpacker.eof:
        raise InferenceRequestError(f"the {encoding} body is cut off; send all of it")
    if unpacker.unused_data:  # further members of gzip, which nobody sends: thousands of them take minutes to walk
        raise InferenceRequestError(f"there are bytes behind the end of the {encoding} body; send one compressed piece")
    return unpacked


def pack(body: bytes, encoding: str) -> bytes:
    """The body compressed."""
    packer = zlib.compressobj(_LEVEL, wbits=_WINDOW_BITS[encoding])
    return packer.compress(body) + packer.flush()
