"""Extracts the image from a multipart/form-data body."""

from __future__ import annotations

from python_multipart.multipart import parse_options_header

from multiworld_serving.common.service.errors import ImageError, InvalidBodyError

FIELD = "image"
"""The form field that contains the file, as in `curl -F image=@photo.jpg`."""

_EXPECTED = f"send exactly one file, in the field {FIELD!r}; options go into the query string"


def extract_image(body: bytes, content_type: str) -> bytes:
    """Return the bytes of the file in the field `image`.

    Args:
        body: the whole form, RFC 2046.
        content_type: the request's header, which contains the boundary.
    Raises:
        InvalidBodyError: not a form, truncated, field missing or empty, another field, or more than one file.
        ImageError: the field is text.
    """
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise InvalidBodyError("the content type multipart/form-data has no boundary; let the HTTP client set it")
    # Split at most into the preamble, two parts and the rest, so that a body of many parts takes no memory.
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary, 3)
    if not parts:
        raise InvalidBodyError(f"the body is not a well-formed multipart form; {_EXPECTED}")
    if parts[0].startswith(b"--"):
        raise InvalidBodyError(f"the form has no field {FIELD!r}; {_EXPECTED}")
    image = _image(parts[0])
    if len(parts) == 1:
        raise InvalidBodyError(f"the multipart form is truncated: it has no closing boundary; {_EXPECTED}")
    if not parts[1].startswith(b"--"):
        _image(parts[1])
        raise InvalidBodyError(f"the form has more than one {FIELD!r}; {_EXPECTED}")
    if not image:
        raise InvalidBodyError(f"the file in the field {FIELD!r} is empty; send an image file in it")
    if image.isascii():
        raise ImageError(f"the field {FIELD!r} has text, and not an image; curl needs an @: -F {FIELD}=@PATH")
    return image


def _image(part: bytes) -> bytes:
    """The content of a part. Raises InvalidBodyError unless it is the field `image`."""
    head, separator, content = part.partition(b"\r\n\r\n")
    if not separator:
        raise InvalidBodyError(f"the body is not a well-formed multipart form; {_EXPECTED}")
    name = ""
    for line in head.split(b"\r\n"):
        header, _, value = line.partition(b":")
        if header.strip().lower() == b"content-disposition":
            name = parse_options_header(value.decode("latin-1"))[1].get(b"name", b"").decode("utf-8", "replace")
    if name != FIELD:
        found = f"the field {name[:64]!r}" if name else "a field without a name"
        raise InvalidBodyError(f"the form has {found}; only {FIELD!r} is expected; {_EXPECTED}")
    return content
