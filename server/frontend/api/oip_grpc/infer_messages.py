"""Converts messages to requests and predictions to messages. All functions are synchronous and stateless."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from multiworld_serving.common.service.errors import InferenceRequestError
from multiworld_serving.common.service.predictor import ModelVersion, Prediction
from multiworld_serving.server.frontend.api.inference import InferRequest
from multiworld_serving.server.frontend.api.oip.infer_request import MAX_FIELDS, MAX_VALUES, infer_request
from multiworld_serving.server.frontend.api.oip.infer_response import encoded_outputs
from multiworld_serving.server.frontend.api.oip.metadata import Signature
from multiworld_serving.server.frontend.api.oip.tensors import abbreviated

SERVICE = "inference.GRPCInferenceService"


class Method(NamedTuple):
    """The message classes of a method."""

    request: Any
    response: Any


def _methods() -> dict[str, Method]:
    compiled = (files("multiworld_serving.server.frontend.api.oip_grpc") / "open_inference.binpb").read_bytes()
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(compiled).file:
        pool.Add(file)
    service = pool.FindServiceByName(SERVICE)
    return {
        method.name: Method(GetMessageClass(method.input_type), GetMessageClass(method.output_type))
        for method in service.methods
    }


METHODS = _methods()
"""The methods of the service by name, of the descriptor that `make proto` compiles from `open_inference.proto`.

Code that protoc generates works only with the release of protobuf it was generated for and the next one, and registers in protobuf's
default pool, where any other copy of the protocol in the process, such as Triton's client, has the same names. These classes have a
pool of their own.
"""

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""The field of `InferTensorContents` for each datatype that models have. FP16 and BF16 have none."""
_LENGTH_BYTES = 4
_MAX_DIMENSIONS = 64
"""More are cut off: no model has as many, so the request is refused in any case."""

_Nested = Mapping[int, "_Nested"]
_NESTED: _Nested = {4: {}, 5: {4: {}}, 6: {2: {}}}
"""Fields of ModelInferRequest with messages: parameters, inputs, outputs, and the parameters of these."""
_MAX_VARINT_BYTES = 10


def decode(message_class: Any, body: bytes) -> Any:
    """The message of this class. Raises InferenceRequestError if it is none."""
    try:
        return message_class.FromString(body)
    except DecodeError as error:
        raise InferenceRequestError(f"the message is not a {message_class.DESCRIPTOR.name} ({error})") from error


def named_model(body: bytes) -> tuple[str, str | None]:
    """The model and the version that a ModelInferRequest names. Every library writes these fields first; otherwise "" and None."""
    found, at = ["", ""], 0
    with contextlib.suppress(IndexError):
        for field, tag in enumerate(b"\x0a\x12"):
            if body[at] == tag:
                size, start = _varint(memoryview(body), at + 1)
                found[field], at = body[start : start + size].decode(errors="replace"), start + size
    return found[0], found[1] or None


def parse_infer_message(body: bytes, signature: Signature, now: ModelVersion) -> InferRequest:
    """The request of a ModelInferRequest.

    Args:
        now: the version that serves.
    Raises:
        UnknownModelError: of another model or version.
        InferenceRequestError: the request is invalid for this model.
    """
    _check_fields(body)
    message = decode(METHODS["ModelInfer"].request, body)
    version = message.model_version or None
    signature.check_served(message.model_name, version, now)
    request = {
        "id": message.id,
        "parameters": _parameters(message.parameters) | {"binary_data_output": True},
        "outputs": [
            {"name": each.name, "parameters": _parameters(each.parameters, without="binary_data")}
            for each in message.outputs
        ],
        "inputs": _inputs(message),
    }
    found = infer_request(request, signature)
    found.version = None if version is None else int(version)
    return found


def infer_message(prediction: Prediction, asked: InferRequest, signature: Signature) -> bytes:
    """A ModelInferResponse, always with raw contents. Raises as `encoded_outputs`."""
    parts = encoded_outputs(prediction, asked.outputs, signature)
    message: bytes = (
        METHODS["ModelInfer"]
        .response(
            model_name=prediction.model,
            model_version=str(prediction.version_number),
            id=asked.id,
            outputs=[{name: each[name] for name in ("name", "datatype", "shape")} for each, _ in parts],
            raw_output_contents=[binary for _, binary in parts],
        )
        .SerializeToString()
    )
    return message


def _parameters(parameters: Mapping[str, Any], without: str = "") -> dict[str, Any]:
    found = ((name, value, value.WhichOneof("parameter_choice")) for name, value in parameters.items())
    return {name: getattr(value, choice) if choice else None for name, value, choice in found if name != without}


def _inputs(message: Any) -> list[dict[str, Any]]:
    """The inputs as JSON describes them, with their values."""
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise InferenceRequestError(
            f"`raw_input_contents` has {len(raw)} elements for {len(message.inputs)} inputs; expected one for each"
        )
    values = sum(len(found) for each in message.inputs for _, found in each.contents.ListFields())
    if values > MAX_VALUES:
        raise InferenceRequestError(
            f"the `contents` of the inputs have {values} values, at most {MAX_VALUES}; send `raw_input_contents`"
        )
    return [
        {
            "name": each.name,
            "datatype": each.datatype,
            "shape": list(each.shape[:_MAX_DIMENSIONS]),
            "parameters": _parameters(each.parameters, without="binary_data_size"),
            "data": _data(each, raw[at] if raw else None),
        }
        for at, each in enumerate(message.inputs)
    ]


def _data(tensor: Any, raw: bytes | None) -> list[Any] | memoryview | None:
    """The values of typed contents; or binary data, also for elements of BYTES; None for an input that is refused."""
    name, datatype, expected = abbreviated(tensor.name), tensor.datatype, _CONTENTS.get(tensor.datatype)
    fields = [field.name for field, _ in tensor.contents.ListFields()]
    if raw is not None:
        if fields:
            raise InferenceRequestError(
                f"the input {name} has both `contents` and `raw_input_contents`; give one of them"
            )
        return memoryview(raw)
    if "shared_memory_region" in tensor.parameters or (expected is None and datatype not in ("FP16", "BF16")):
        return None
    if fields != [expected] and (fields or 0 not in tensor.shape):
        raise InferenceRequestError(
            f"the input {name} of {datatype} has its values in {' and '.join(fields) or 'no field'}; expected raw_input_contents"
            + ("" if expected is None else f" or {expected}")
        )
    values = [] if expected is None else list(getattr(tensor.contents, expected))
    if datatype != "BYTES" and expected is not None:
        return values
    return memoryview(b"".join(part for each in values for part in (len(each).to_bytes(_LENGTH_BYTES, "little"), each)))


def _check_fields(body: bytes) -> None:
    """Raise InferenceRequestError for a message of many small fields, which would take a hundred times its size in memory."""
    try:
        left = _count(memoryview(body), _NESTED, MAX_FIELDS)
    except IndexError as error:
        raise InferenceRequestError("the message is not a ModelInferRequest (it is truncated)") from error
    if left < 0:
        raise InferenceRequestError(
            f"the message has more than {MAX_FIELDS} inputs, outputs, parameters and their fields"
        )


def _count(data: memoryview, nested: _Nested, left: int) -> int:
    """`left` minus the number of fields, also of nested messages; negative as soon as there are too many.

    Raises:
        IndexError: a field ends behind the data.
    """
    at = 0
    while at < len(data) and left >= 0:
        tag, at = _varint(data, at)
        left -= 1
        match tag & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 2:
                size, at = _varint(data, at)
                if tag >> 3 in nested:
                    left = _count(data[at : at + size], nested[tag >> 3], left)
                at += size
            case 5:
                at += 4
            case other:
                raise InferenceRequestError(f"the message is not a ModelInferRequest (a field has wire type {other})")
    return left


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number at this position, and the position behind it."""
    value = 0
    for count in range(_MAX_VARINT_BYTES):
        byte = data[at + count]
        value |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return value, at + count + 1
    raise InferenceRequestError("the message is not a ModelInferRequest (a number has more than ten bytes)")
