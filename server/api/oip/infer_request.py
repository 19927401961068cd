"""Parses the body of an inference request: JSON, JSON followed by binary data, or one raw tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from multiworld_serving.server.api.oip.metadata import INPUT, OUTPUT, Signature
from multiworld_serving.server.api.oip.tensors import (
    Image,
    abbreviated,
    image_from_raw,
    images_from_binary,
    images_from_json,
)
from multiworld_serving.server.errors import InferenceRequestError

_MAX_JSON_VALUES = 1_000_000
_MAX_JSON_FIELDS = 20_000
"""Parsing holds the GIL and so blocks the leader's event loop: about 50 ms for this many values, but seconds for a body full of
lists and fields. Counting commas, brackets and colons limits it before parsing. Sixty-four images as nested lists, as large as
the limit of values allows, have 14,000 lists."""

_MAX_TIMEOUT_US = 2**63 - 1


@dataclass(frozen=True)
class OutputOptions:
    """How to return the probabilities.

    Attributes:
        id: the client's id, to be returned; None = none.
        classes: return this many of the most probable classes as "value:index:label"; 0 = return the tensor.
        binary: return the data after the JSON instead of in it.
    """

    id: str | None = None
    classes: int = 0
    binary: bool = False


@dataclass(frozen=True)
class InferRequest:
    """A parsed request.

    Attributes:
        images: at least one, in the order of the batch dimension.
        timeout_s: the client's timeout since the request's arrival; None = the server's.
    """

    images: list[Image]
    output: OutputOptions
    timeout_s: float | None = None


def parse_infer_request(body: bytes, json_bytes: int | None, signature: Signature) -> InferRequest:
    """Parse the body.

    Args:
        json_bytes: length of the JSON at the start, from `Inference-Header-Content-Length`; 0 = the body is one image and the
            response is binary; None = the whole body is JSON.
    Raises:
        InferenceRequestError: the request is invalid for this model.
    """
    if json_bytes == 0:
        return InferRequest(image_from_raw(body, signature), OutputOptions(binary=True))
    if json_bytes is not None and json_bytes > len(body):
        raise InferenceRequestError(
            f"Inference-Header-Content-Length is {json_bytes}, but the body has only {len(body)} bytes"
        )
    request = _json_object(body if json_bytes is None else body[:json_bytes])
    binary = None if json_bytes is None else memoryview(body)[json_bytes:]
    parameters = _object(request.get("parameters"), "`parameters` of the request")
    for name in parameters:
        if name.startswith("sequence_") and parameters[name] not in (0, "", False):
            raise InferenceRequestError(
                f"the parameter {abbreviated(name)} is for stateful models, and this model is stateless; omit it"
            )
    classes, binary_output = _output(request.get("outputs"), _flag(parameters, "binary_data_output"), signature)
    return InferRequest(
        images=_images(request.get("inputs"), binary, signature),
        output=OutputOptions(_id(request.get("id")), classes, binary_output),
        timeout_s=_timeout_s(parameters.get("timeout")),
    )


def _json_object(data: bytes) -> dict[str, Any]:
    values, fields = data.count(b","), data.count(b"[") + data.count(b"{") + data.count(b":")
    if values > _MAX_JSON_VALUES or fields > _MAX_JSON_FIELDS:
        raise InferenceRequestError(
            f"the JSON has more than {_MAX_JSON_VALUES} values or {_MAX_JSON_FIELDS} lists and fields; "
            "send the numbers as binary data"
        )
    try:
        found = from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise InferenceRequestError(
            f"the body is not valid JSON ({error}); if binary data follows the JSON, Inference-Header-Content-Length must be "
            "the length of the JSON"
        ) from error
    return _object(found, "body")


def _images(inputs: object, binary: memoryview | None, signature: Signature) -> list[Image]:
    if not isinstance(inputs, list) or not inputs:
        raise InferenceRequestError(f"the request has no list `inputs` with the input {INPUT!r}; send one")
    tensors = [_object(tensor, "member of `inputs`") for tensor in inputs]
    for tensor in tensors:
        if tensor.get("name") != INPUT:
            raise InferenceRequestError(
                f"there is no input {abbreviated(tensor.get('name'))}; the model's only input is {INPUT!r}"
            )
    if len(tensors) > 1:
        raise InferenceRequestError(f"the input {INPUT!r} is given {len(tensors)} times; expected once")
    return _images_of(tensors[0], binary, signature)


def _images_of(tensor: Mapping[str, Any], binary: memoryview | None, signature: Signature) -> list[Image]:
    parameters = _object(tensor.get("parameters"), f"`parameters` of input {INPUT!r}")
    if "shared_memory_region" in parameters:
        raise InferenceRequestError("shared memory is not supported; send the data in the request")
    size = parameters.get("binary_data_size")
    if size is None:
        if binary is not None and binary.nbytes:
            raise InferenceRequestError(
                f"{binary.nbytes} bytes follow the JSON, but no input has `binary_data_size` in its `parameters`"
            )
        return images_from_json(tensor, signature)
    if "data" in tensor:
        raise InferenceRequestError(f"the input {INPUT!r} has both `data` and `binary_data_size`; give one of them")
    if type(size) is not int or binary is None or size != binary.nbytes:
        follow = (
            "none, since Inference-Header-Content-Length is missing" if binary is None else f"{binary.nbytes} bytes"
        )
        raise InferenceRequestError(
            f"the input {INPUT!r} has `binary_data_size` {abbreviated(size)}, but after the JSON there are {follow}"
        )
    return images_from_binary(tensor, binary, signature)


def _output(outputs: object, binary: bool, signature: Signature) -> tuple[int, bool]:
    """The number of classes to return, and whether as binary data."""
    if outputs is None or outputs == []:
        return 0, binary
    if not isinstance(outputs, list):
        raise InferenceRequestError("`outputs` must be a list of objects, each with a `name`")
    wanted = [_object(output, "member of `outputs`") for output in outputs]
    for output in wanted:
        if output.get("name") != OUTPUT:
            raise InferenceRequestError(
                f"there is no output {abbreviated(output.get('name'))}; the model's only output is {OUTPUT!r}"
            )
    if len(wanted) > 1:
        raise InferenceRequestError(f"the output {OUTPUT!r} is requested {len(wanted)} times; expected once")
    parameters = _object(wanted[0].get("parameters"), f"`parameters` of output {OUTPUT!r}")
    if "shared_memory_region" in parameters:
        raise InferenceRequestError("shared memory is not supported; read the data from the response")
    classes = parameters.get("classification", 0)
    if type(classes) is not int or classes < 0:
        raise InferenceRequestError(
            f"`classification` is {abbreviated(classes)}; expected the number of classes to return"
        )
    return min(classes, signature.num_classes), _flag(parameters, "binary_data", binary)


def _id(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InferenceRequestError(f"`id` is {abbreviated(value)}; expected a string")
    return value or None


def _timeout_s(value: object) -> float | None:
    """Convert microseconds to seconds; 0 = no timeout, as in Triton."""
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= _MAX_TIMEOUT_US:
        raise InferenceRequestError(
            f"`timeout` is {abbreviated(value)}; expected an integer number of microseconds, at least 0"
        )
    return value / 1e6 or None


def _flag(parameters: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InferenceRequestError(f"`{name}` is {abbreviated(value)}; expected true or false")
    return value


def _object(value: object, what: str) -> dict[str, Any]:
    """Return `value` if it is a JSON object; missing `parameters` are empty."""
    if value is None and what.startswith("`parameters`"):
        return {}
    if not isinstance(value, dict):
        raise InferenceRequestError(f"the {what} is {abbreviated(value)}; expected a JSON object")
    return value
