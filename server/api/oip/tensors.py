"""Converts the input tensor of an inference request, JSON or binary, to images.

Datatype, shape and data size are validated in this order before memory is allocated. All functions are synchronous and
stateless; they run on the decoding threads.
"""

from __future__ import annotations

import base64
import binascii
import reprlib
from array import array
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from multiworld_serving.server.api.oip.metadata import INPUT, Signature
from multiworld_serving.server.errors import InferenceRequestError

Image = Tensor | bytes
"""Pixels as uint8 [3, S, S], RGB, contiguous; or the bytes of a JPEG, PNG or WebP file, not yet decoded."""

_ITEM_BYTES = {"UINT8": 1, "FP32": 4}
_LENGTH_BYTES = 4
_HALF_GREY_LEVEL = 0.5 / 255

_short = reprlib.Repr()
_short.maxlevel, _short.maxlist, _short.maxstring, _short.maxother = 2, 8, 64, 64


def abbreviated(value: object) -> str:
    """A client's value for an error message, shortened without traversing all of it."""
    return _short.repr(value)


def images_from_json(tensor: Mapping[str, Any], signature: Signature) -> list[Image]:
    """The images of an input with its values in `data`, flat or nested like its shape. BYTES are base64.

    Raises:
        InferenceRequestError: the input is invalid for this model.
    """
    datatype, shape = _datatype(tensor), _shape(tensor, signature)
    data = tensor.get("data")
    if not isinstance(data, list):
        raise InferenceRequestError(
            f"the input {INPUT!r} has no list `data`; send its values there, or after the JSON with `binary_data_size`"
        )
    values = _flat(data, shape)
    if datatype == "BYTES":
        return [_from_base64(value, number) for number, value in enumerate(values)]
    return _pixels(datatype, memoryview(_packed(values, datatype)).cast("B"), shape[0], signature)


def images_from_binary(tensor: Mapping[str, Any], data: memoryview, signature: Signature) -> list[Image]:
    """The images of an input with binary values: little-endian, row-major; BYTES as length (uint32) and content.

    Raises:
        InferenceRequestError: the input is invalid for this model.
    """
    datatype, shape = _datatype(tensor), _shape(tensor, signature)
    if datatype == "BYTES":
        return _elements(data, shape[0])
    expected = shape[0] * signature.image_values * _ITEM_BYTES[datatype]
    if data.nbytes != expected:
        raise InferenceRequestError(
            f"the input {INPUT!r} of {datatype} {list(shape)} requires {expected} bytes of data, not {data.nbytes}"
        )
    return _pixels(datatype, data, shape[0], signature)


def image_from_raw(body: bytes, signature: Signature) -> list[Image]:
    """The image of a request without JSON (`Inference-Header-Content-Length: 0`): UINT8, shaped as in the metadata.

    Raises:
        InferenceRequestError: its size is wrong.
    """
    if len(body) != signature.image_values:
        raise InferenceRequestError(
            f"without JSON the body is one image, UINT8 {list(signature.image_shape)}: {signature.image_values} bytes, "
            f"not {len(body)}; send image files to /predict, or as BYTES with JSON"
        )
    return _pixels("UINT8", memoryview(body), 1, signature)


def _datatype(tensor: Mapping[str, Any]) -> str:
    datatype = tensor.get("datatype")
    if datatype not in ("UINT8", "FP32", "BYTES"):
        raise InferenceRequestError(
            f"the input {INPUT!r} has datatype {abbreviated(datatype)}; send UINT8 (0 to 255), FP32 (0 to 1) or BYTES (files)"
        )
    return str(datatype)


def _shape(tensor: Mapping[str, Any], signature: Signature) -> tuple[int, ...]:
    """The shape, if it is valid for the model. Raises InferenceRequestError if it is not."""
    shape = tensor.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):
        raise InferenceRequestError(f"the input {INPUT!r} has shape {abbreviated(shape)}; expected a list of integers")
    if tensor["datatype"] == "BYTES":
        if len(shape) not in (1, 2) or shape[1:] not in ([], [1]):
            raise InferenceRequestError(
                f"the input {INPUT!r} of BYTES has shape {abbreviated(shape)}; expected [N] or [N, 1]"
            )
    elif tuple(shape[1:]) != signature.image_shape:
        raise InferenceRequestError(_wrong_shape(shape, signature))
    if not 1 <= shape[0] <= signature.max_images:
        raise InferenceRequestError(
            f"the input {INPUT!r} has {abbreviated(shape[0])} images; expected 1 to {signature.max_images} in one request"
        )
    return tuple(shape)


def _wrong_shape(shape: list[int], signature: Signature) -> str:
    channels, height, width = signature.image_shape
    hint = "resize and crop first, or send image files as BYTES"
    if tuple(shape) == signature.image_shape:
        hint = "put the batch dimension in front"
    elif shape[1:] == [height, width, channels]:
        hint = "put the channels before height and width"
    return f"the input {INPUT!r} has shape {abbreviated(shape)}; expected [N, {channels}, {height}, {width}]: {hint}"


def _flat(data: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """Flatten `data` and check that it fills the shape."""
    level = data
    if data and isinstance(data[0], list):
        for axis, size in enumerate(shape):
            if axis:
                if not all(isinstance(part, list) and len(part) == size for part in level):
                    raise InferenceRequestError(
                        f"the `data` of input {INPUT!r} is nested, but not into lists of {size} everywhere at dimension {axis}"
                    )
                level = list(chain.from_iterable(level))
            elif len(level) != size:
                break
    count = 1
    for size in shape:
        count *= size
    if len(level) != count:
        raise InferenceRequestError(
            f"the `data` of input {INPUT!r} does not fill its shape {list(shape)}: it has {len(level)} values, expected {count}"
        )
    return level


def _packed(values: list[Any], datatype: str) -> array[int] | array[float]:
    kinds = set(map(type, values))
    allowed: set[type] = {int} if datatype == "UINT8" else {int, float}
    if not kinds <= allowed:
        found = ", ".join(sorted(kind.__name__ for kind in kinds - allowed))
        raise InferenceRequestError(f"the `data` of input {INPUT!r} must be numbers for {datatype}, and has {found}")
    try:
        return array("B", values) if datatype == "UINT8" else array("f", values)
    except OverflowError as error:
        range_ = "0 to 255" if datatype == "UINT8" else "0 to 1"
        raise InferenceRequestError(f"the input {INPUT!r} of {datatype} has values outside {range_}") from error


def _pixels(datatype: str, data: memoryview, images: int, signature: Signature) -> list[Image]:
    size = len(data) // images
    parts = (
        bytearray(data[at : at + size]) for at in range(0, len(data), size)
    )  # copies, so that the body can be freed
    if datatype == "UINT8":
        return [torch.frombuffer(part, dtype=torch.uint8).view(signature.image_shape) for part in parts]
    return [_grey_levels(torch.frombuffer(part, dtype=torch.float32)).view(signature.image_shape) for part in parts]


def _grey_levels(values: Tensor) -> Tensor:
    """Convert float32 in 0..1 to uint8, rounded to the nearest of 256 levels. Overwrites `values`."""
    low, high = (bound.item() for bound in values.aminmax())
    if not (low >= -_HALF_GREY_LEVEL and high <= 1 + _HALF_GREY_LEVEL):  # also true for NaN
        raise InferenceRequestError(
            f"the input {INPUT!r} of FP32 has values from {low:g} to {high:g}; expected 0 to 1, not normalized: the server applies "
            "mean and standard deviation; or send 0 to 255 as UINT8"
        )
    return values.mul_(255).round_().clamp_(0, 255).to(torch.uint8)


def _elements(data: memoryview, count: int) -> list[Image]:
    found: list[Image] = []
    at = 0
    for number in range(count):
        start = at + _LENGTH_BYTES
        end = start + int.from_bytes(data[at:start], "little")
        if start > len(data) or end > len(data):
            raise InferenceRequestError(
                f"element {number} of input {INPUT!r} ends after its {len(data)} bytes of data; each element of BYTES is "
                "its length as 4 bytes, little-endian, followed by its content"
            )
        found.append(bytes(data[start:end]))
        at = end
    if at != len(data):
        raise InferenceRequestError(
            f"the input {INPUT!r} has {len(data) - at} bytes of data left over after its {count} elements"
        )
    return found


def _from_base64(value: object, number: int) -> bytes:
    try:
        if isinstance(value, str):
            return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise InferenceRequestError(
        f"element {number} of input {INPUT!r} is not base64; in JSON an image file is sent as base64, in binary data as it is"
    )
