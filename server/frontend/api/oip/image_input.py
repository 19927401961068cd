"""Converts the input of an inference request for a model with image preprocessing to images: pixels, or files.

All functions are synchronous and stateless; they run on the decoding threads.
"""

from __future__ import annotations

import base64
import binascii

import torch
from torch import Tensor

from multiworld_serving.common.service.errors import InferenceRequestError
from multiworld_serving.server.frontend.api.oip.metadata import Signature
from multiworld_serving.server.frontend.api.oip.tensors import (
    InputTensor,
    abbreviated,
    bytes_elements,
    check_rows,
    json_data,
    tensor_values,
)

_HALF_GREY_LEVEL = 0.5 / 255


def image_input(tensor: InputTensor, signature: Signature) -> Tensor | list[bytes]:
    """The images of an input: UINT8, FP32 (0 to 1), or BYTES (files, not yet decoded; in JSON as base64).

    Returns:
        Pixels as uint8 [N, 3, S, S], RGB, contiguous; or JPEG, PNG or WebP files.
    Raises:
        InferenceRequestError: the input is invalid for this model.
    """
    name, datatype, shape = tensor.name, tensor.datatype, tensor.shape
    if datatype not in ("UINT8", "FP32", "BYTES"):
        raise InferenceRequestError(
            f"the input {name!r} has datatype {abbreviated(datatype)}; send UINT8 (0 to 255), FP32 (0 to 1) or BYTES (files)"
        )
    if datatype == "BYTES":
        if len(shape) not in (1, 2) or shape[1:] not in ([], [1]):
            raise InferenceRequestError(
                f"the input {name!r} of BYTES has shape {abbreviated(shape)}; expected [N] or [N, 1]"
            )
    elif tuple(shape[1:]) != signature.model.inputs[0].shape[1:]:
        raise InferenceRequestError(_wrong_shape(name, shape, signature))
    check_rows(name, shape[0], signature.max_rows, "images")
    if datatype == "BYTES":
        if isinstance(tensor.data, memoryview):
            return bytes_elements(name, tensor.data, shape[0])
        return [_from_base64(name, value, at) for at, value in enumerate(json_data(tensor))]
    values = tensor_values(tensor)
    return values if datatype == "UINT8" else _grey_levels(name, values)


def _wrong_shape(name: str, shape: list[int], signature: Signature) -> str:
    channels, height, width = of_one = signature.model.inputs[0].shape[1:]
    hint = "resize and crop first, or send image files as BYTES"
    if tuple(shape) == of_one:
        hint = "put the batch dimension in front"
    elif shape[1:] == [height, width, channels]:
        hint = "put the channels before height and width"
    return f"the input {name!r} has shape {abbreviated(shape)}; expected [N, {channels}, {height}, {width}]: {hint}"


def _grey_levels(name: str, values: Tensor) -> Tensor:
    """Convert float32 in 0..1 to uint8, rounded to the nearest of 256 levels. Overwrites `values`."""
    low, high = (bound.item() for bound in values.aminmax())
    if not (low >= -_HALF_GREY_LEVEL and high <= 1 + _HALF_GREY_LEVEL):  # also true for NaN
        raise InferenceRequestError(
            f"the input {name!r} of FP32 has values from {low:g} to {high:g}; expected 0 to 1, not normalized: the server applies "
            "mean and standard deviation; or send 0 to 255 as UINT8"
        )
    return values.mul_(255).round_().clamp_(0, 255).to(torch.uint8)


def _from_base64(name: str, value: object, number: int) -> bytes:
    try:
        if isinstance(value, str):
            return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise InferenceRequestError(
        f"element {number} of input {name!r} is not base64; in JSON an image file is sent as base64, in binary data as it is"
    )
