"""The body of an inference request: JSON, JSON followed by binary data, or one raw tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from server.errors import InferenceRequestError
from server.v2.signature import INPUT, OUTPUT, Signature
from server.v2.tensors import Image, image_from_raw, images_from_binary, images_from_json, shown

_MAX_JSON_VALUES = 1_000_000
_MAX_JSON_FIELDS = 20_000
"""Parsing holds the GIL, and with it the leader's event loop: so many values take some 50 ms, while as many lists and fields of
objects as fit into a body would take seconds. Counting commas, brackets and colons tells before it is begun. Sixty-four images
nested into lists, as large as so many values allow, have 14,000 lists."""

_MAX_TIMEOUT_US = 2**63 - 1


@dataclass(frozen=True)
class RequestedAnswer:
    """How the probabilities are to be answered.

    Attributes:
        id: the client's, to be answered with; None when there is none.
        classes: answer so many of the most probable classes as "value:index:label"; 0 answers the tensor.
        binary: after the JSON, and not in it.
    """

    id: str | None = None
    classes: int = 0
    binary: bool = False


@dataclass(frozen=True)
class InferRequest:
    """What a client asks.

    Attributes:
        images: at least one, in the order of the batch dimension.
        timeout_s: what the client gives it, from its arrival on; None leaves it to the server.
    """

    images: list[Image]
    answer: RequestedAnswer
    timeout_s: float | None = None


def parse_infer_request(body: bytes, json_bytes: int | None, signature: Signature) -> InferRequest:
    """Read the body.

    Args:
        json_bytes: length of the JSON at its front, from `Inference-Header-Content-Length`; 0 = the body is one image and
            the answer is binary; None = all of the body is JSON.
    Raises:
        InferenceRequestError: it is not a request that this model can answer.
    """
    if json_bytes == 0:
        return InferRequest(image_from_raw(body, signature), RequestedAnswer(binary=True))
    if json_bytes is not None and json_bytes > len(body):
        raise InferenceRequestError(
            f"Inference-Header-Content-Length is {json_bytes}, but the body has only {len(body)} bytes"
        )
    request = _json_object(body if json_bytes is None else body[:json_bytes])
    binary = None if json_bytes is None else memoryview(body)[json_bytes:]
    parameters = _object(request.get("parameters"), "`parameters` of the request")
    for name in parameters:
        if name.startswith("sequence_") and parameters[name] not in (0, "", False):
            raise InferenceRequestError(f"the parameter {shown(name)} is for stateful models, and this one is not")
    classes, binary_answer = _output(request.get("outputs"), _flag(parameters, "binary_data_output"), signature)
    return InferRequest(
        images=_images(request.get("inputs"), binary, signature),
        answer=RequestedAnswer(_id(request.get("id")), classes, binary_answer),
        timeout_s=_timeout_s(parameters.get("timeout")),
    )


def _json_object(data: bytes) -> dict[str, Any]:
    values, fields = data.count(b","), data.count(b"[") + data.count(b"{") + data.count(b":")
    if values > _MAX_JSON_VALUES or fields > _MAX_JSON_FIELDS:
        raise InferenceRequestError(
            f"the JSON has more than {_MAX_JSON_VALUES} values or {_MAX_JSON_FIELDS} lists and fields; "
            "send so many numbers as binary data"
        )
    try:
        found = from_json(data, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise InferenceRequestError(
            f"the body is not valid JSON ({error}); where binary data follows it, Inference-Header-Content-Length must say "
            "how long the JSON is"
        ) from error
    return _object(found, "body")


def _images(inputs: object, binary: memoryview | None, signature: Signature) -> list[Image]:
    if not isinstance(inputs, list) or not inputs:
        raise InferenceRequestError(f"the request has no list `inputs` with the input {INPUT!r}")
    tensors = [_object(tensor, "member of `inputs`") for tensor in inputs]
    for tensor in tensors:
        if tensor.get("name") != INPUT:
            raise InferenceRequestError(
                f"there is no input {shown(tensor.get('name'))}; the model's only one is {INPUT!r}"
            )
    if len(tensors) > 1:
        raise InferenceRequestError(f"the input {INPUT!r} is given {len(tensors)} times; expected once")
    return _images_of(tensors[0], binary, signature)


def _images_of(tensor: Mapping[str, Any], binary: memoryview | None, signature: Signature) -> list[Image]:
    parameters = _object(tensor.get("parameters"), f"`parameters` of input {INPUT!r}")
    if "shared_memory_region" in parameters:
        raise InferenceRequestError("shared memory is not served; send the data in the request")
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
        follow = "none, for Inference-Header-Content-Length is missing" if binary is None else f"{binary.nbytes} bytes"
        raise InferenceRequestError(
            f"the input {INPUT!r} has `binary_data_size` {shown(size)}, but behind the JSON there are {follow}"
        )
    return images_from_binary(tensor, binary, signature)


def _output(outputs: object, binary: bool, signature: Signature) -> tuple[int, bool]:
    """How many classes are wanted, and whether as binary data."""
    if outputs is None or outputs == []:
        return 0, binary
    if not isinstance(outputs, list):
        raise InferenceRequestError("`outputs` must be a list of objects, each with a `name`")
    wanted = [_object(output, "member of `outputs`") for output in outputs]
    for output in wanted:
        if output.get("name") != OUTPUT:
            raise InferenceRequestError(
                f"there is no output {shown(output.get('name'))}; the model's only one is {OUTPUT!r}"
            )
    if len(wanted) > 1:
        raise InferenceRequestError(f"the output {OUTPUT!r} is asked for {len(wanted)} times; expected once")
    parameters = _object(wanted[0].get("parameters"), f"`parameters` of output {OUTPUT!r}")
    if "shared_memory_region" in parameters:
        raise InferenceRequestError("shared memory is not served; take the data from the answer")
    classes = parameters.get("classification", 0)
    if type(classes) is not int or classes < 0:
        raise InferenceRequestError(f"`classification` is {shown(classes)}; expected how many classes to answer with")
    return min(classes, signature.num_classes), _flag(parameters, "binary_data", binary)


def _id(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InferenceRequestError(f"`id` is {shown(value)}; expected a text")
    return value or None


def _timeout_s(value: object) -> float | None:
    """Microseconds; 0 stands for none, as in Triton."""
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= _MAX_TIMEOUT_US:
        raise InferenceRequestError(f"`timeout` is {shown(value)}; expected a whole number of microseconds, at least 0")
    return value / 1e6 or None


def _flag(parameters: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InferenceRequestError(f"`{name}` is {shown(value)}; expected true or false")
    return value


def _object(value: object, what: str) -> dict[str, Any]:
    """The JSON object; an optional one that is missing is empty."""
    if value is None and what.startswith("`parameters`"):
        return {}
    if not isinstance(value, dict):
        raise InferenceRequestError(f"the {what} is {shown(value)}; expected a JSON object")
    return value
