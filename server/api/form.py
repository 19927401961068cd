"""Extracts the image from a multipart/form-data body."""

from __future__ import annotations

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from multiworld_serving.server.errors import InvalidBodyError

FIELD = "image"
"""The form field that contains the file, as in `curl -F image=@photo.jpg`."""

_EXPECTED = f"send exactly one file, in the field {FIELD!r}; options go into the query string"


def extract_image(body: bytes, content_type: str) -> bytes:
    """Return the bytes of the file in the field `image`.

    Args:
        body: the whole form.
        content_type: the request's header, which contains the boundary.
    Raises:
        InvalidBodyError: not a form, truncated, field missing or empty, another field, or more than one file.
    """
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise InvalidBodyError("the content type multipart/form-data has no boundary; let the HTTP client set it")
    form = _ImageForm()
    try:
        parser = MultipartParser(boundary, form.callbacks())  # type: ignore[arg-type]
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidBodyError(f"the body is not a well-formed multipart form ({error}); {_EXPECTED}") from error
    return form.image()


class _ImageForm:
    """Callbacks of the parser. Rejects the first unexpected part, so at most one part is in memory."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._value = bytearray()
        self._name: str | None = None
        self._images = 0
        self._complete = False
        self._data: list[memoryview] = []

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._part_begins,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header_ends,
            "on_headers_finished": self._headers_end,
            "on_part_data": lambda data, start, end: self._data.append(memoryview(data)[start:end]),
            "on_end": self._form_ends,
        }

    def image(self) -> bytes:
        if not self._complete:
            raise InvalidBodyError(f"the multipart form is truncated: it has no closing boundary; {_EXPECTED}")
        if not self._images:
            raise InvalidBodyError(f"the form has no field {FIELD!r}; {_EXPECTED}")
        image = b"".join(self._data)
        if not image:
            raise InvalidBodyError(f"the file in the field {FIELD!r} is empty; send an image file in it")
        return image

    def _part_begins(self) -> None:
        self._name = None

    def _header_ends(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value.decode("latin-1"))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._header.clear()
        self._value.clear()

    def _headers_end(self) -> None:
        if self._name != FIELD:
            found = "a field without a name" if not self._name else f"the field {self._name[:64]!r}"
            raise InvalidBodyError(f"the form has {found}; only {FIELD!r} is expected; {_EXPECTED}")
        self._images += 1
        if self._images > 1:
            raise InvalidBodyError(f"the form has more than one {FIELD!r}; {_EXPECTED}")

    def _form_ends(self) -> None:
        self._complete = True
