"""Parses inference requests: JSON, JSON followed by binary data, or one raw tensor.

gRPC has another encoding of the same request: it calls `named_inputs` and `infer_request` with what it has decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json
from torch import Tensor

from multiworld_serving.models.bundle.manifest import TensorSpec
from multiworld_serving.models.errors import BundleError
from multiworld_serving.server.api.oip.image_input import Image, image_from_raw, image_input
from multiworld_serving.server.api.oip.metadata import Signature
from multiworld_serving.server.api.oip.tensors import BINARY_ONLY, DATATYPES, abbreviated, input_tensor
from multiworld_serving.server.errors import InferenceRequestError

MAX_VALUES = 1_000_000
MAX_FIELDS = 20_000
"""Parsing holds the GIL and so blocks the leader's event loop: about 50 ms for this many values, but seconds for a body full of
lists and fields. Counting commas, brackets and colons limits it before parsing. Sixty-four images as nested lists, as large as
the limit of values allows, have 14,000 lists."""

_MAX_TIMEOUT_US = 2**63 - 1

Given = list[tuple[dict[str, Any], memoryview | None]]
"""Each input as the request describes it, and its binary data; None if its values are in its `data`."""


@dataclass(frozen=True)
class OutputOptions:
    """How to return one output.

    Attributes:
        index: of the model's outputs.
        classes: return this many of the most probable classes as "value:index:label"; 0 = return the tensor.
        binary: return the data after the JSON instead of in it.
    """

    index: int
    classes: int = 0
    binary: bool = False


@dataclass(frozen=True)
class InferRequest:
    """A parsed request.

    Attributes:
        rows: at least one, in the order of the batch dimension: input rows of the model, or image files.
        key: of the rows; see `RowFormat.key`.
        outputs: at least one, in the order of the response.
        id: the client's id, to be returned; None = none.
        timeout_s: the client's timeout since the request's arrival; None = the server's.
        version: number of the version that must answer; None = any.
    """

    rows: Sequence[Image]
    key: str
    outputs: Sequence[OutputOptions]
    id: str | None = None
    timeout_s: float | None = None
    version: int | None = None


def parse_infer_request(body: bytes, json_bytes: int | None, signature: Signature) -> InferRequest:
    """Parse the body.

    Args:
        json_bytes: length of the JSON at the start, from `Inference-Header-Content-Length`; 0 = the body is one image and the
            response is binary; None = the whole body is JSON.
    Raises:
        InferenceRequestError: the request is invalid for this model.
    """
    if json_bytes == 0:
        outputs = [OutputOptions(index, binary=True) for index in range(len(signature.model.outputs))]
        if signature.model.image is not None:
            return InferRequest(image_from_raw(body, signature), "", outputs)
        return InferRequest(*_raw_row(body, signature), outputs)
    if json_bytes is not None and json_bytes > len(body):
        raise InferenceRequestError(
            f"Inference-Header-Content-Length is {json_bytes}, but the body has only {len(body)} bytes"
        )
    request = _json_object(body if json_bytes is None else body[:json_bytes])
    binary = None if json_bytes is None else memoryview(body)[json_bytes:]
    return infer_request(request, _with_data(named_inputs(request.get("inputs"), signature), binary), signature)


def infer_request(request: Mapping[str, Any], given: Given, signature: Signature) -> InferRequest:
    """The request that a client describes, as in JSON.

    Raises:
        InferenceRequestError: the request is invalid for this model.
    """
    parameters = _object(request.get("parameters"), "`parameters` of the request")
    for name in parameters:
        if name.startswith("sequence_") and parameters[name] not in (0, "", False):
            raise InferenceRequestError(
                f"the parameter {abbreviated(name)} is for stateful models, and this model is stateless; omit it"
            )
    outputs = _outputs(request.get("outputs"), _flag(parameters, "binary_data_output"), signature)
    rows: Sequence[Image]
    if signature.model.image is not None:
        ((tensor, data),) = given
        rows, key = image_input(tensor, data, signature), ""
    else:
        rows, key = _rows(given, signature)
    return InferRequest(
        rows=rows,
        key=key,
        outputs=outputs,
        id=_id(request.get("id")),
        timeout_s=_timeout_s(parameters.get("timeout")),
    )


def _json_object(data: bytes) -> dict[str, Any]:
    values, fields = data.count(b","), data.count(b"[") + data.count(b"{") + data.count(b":")
    if values > MAX_VALUES or fields > MAX_FIELDS:
        raise InferenceRequestError(
            f"the JSON has more than {MAX_VALUES} values or {MAX_FIELDS} lists and fields; "
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


def named_inputs(inputs: object, signature: Signature) -> list[dict[str, Any]]:
    """The inputs of the request, in its order. Raises InferenceRequestError unless they are the model's, each once."""
    names = [spec.name for spec in signature.model.inputs]
    if not isinstance(inputs, list) or not inputs:
        raise InferenceRequestError(f"the request has no list `inputs`; the model's {_named('input', names)}")
    tensors = [_object(tensor, "member of `inputs`") for tensor in inputs]
    by_name = {name: [tensor for tensor in tensors if tensor.get("name") == name] for name in names}
    for tensor in tensors:
        if tensor.get("name") not in names:
            raise InferenceRequestError(
                f"there is no input {abbreviated(tensor.get('name'))}; the model's only {_named('input', names)}"
            )
    for name, found in by_name.items():
        if len(found) != 1:
            raise InferenceRequestError(f"the input {name!r} is given {len(found)} times; expected once")
        if "shared_memory_region" in _object(found[0].get("parameters"), f"`parameters` of input {name!r}"):
            raise InferenceRequestError("shared memory is not supported; send the data in the request")
    return tensors


def _named(kind: str, names: Sequence[str]) -> str:
    """ "input is 'a'", or "inputs are 'a', 'b'"."""
    listed = ", ".join(map(repr, names))
    return f"{kind} is {listed}" if len(names) == 1 else f"{kind}s are {listed}"


def _with_data(tensors: list[dict[str, Any]], binary: memoryview | None) -> Given:
    """Each input with its part of the binary data that follow the JSON."""
    found: Given = []
    at = 0
    for tensor in tensors:
        name = tensor["name"]
        parameters = _object(tensor.get("parameters"), f"`parameters` of input {name!r}")
        size = parameters.get("binary_data_size")
        if size is None:
            found.append((tensor, None))
            continue
        if "data" in tensor:
            raise InferenceRequestError(f"the input {name!r} has both `data` and `binary_data_size`; give one of them")
        left = 0 if binary is None else binary.nbytes - at
        last = tensor is tensors[-1]
        if type(size) is not int or binary is None or not (size == left if last else 0 <= size <= left):
            follow = "none, since Inference-Header-Content-Length is missing" if binary is None else f"{left} bytes"
            raise InferenceRequestError(
                f"the input {name!r} has `binary_data_size` {abbreviated(size)}, but after the JSON there are {follow}"
                + (" for it" if at else "")
            )
        found.append((tensor, binary[at : at + size]))
        at += size
    if binary is not None and at < binary.nbytes:
        raise InferenceRequestError(
            f"{binary.nbytes - at} bytes follow the JSON, but no input has `binary_data_size` in its `parameters`"
            + (" for them" if at else "")
        )
    return found


def _rows(
    given: Sequence[tuple[Mapping[str, Any], memoryview | None]], signature: Signature
) -> tuple[Sequence[Tensor], str]:
    """The input rows, and their key."""
    model = signature.model
    by_name = {tensor["name"]: (tensor, data) for tensor, data in given}
    tensors = [input_tensor(*by_name[spec.name], spec, model.dimensions, signature.max_rows) for spec in model.inputs]
    counts = {spec.name: len(tensor) for spec, tensor in zip(model.inputs, tensors, strict=True)}
    if len(set(counts.values())) > 1:
        raise InferenceRequestError(
            f"the inputs have different numbers of rows: {abbreviated(counts)}; expected equal ones"
        )
    return _packed(tensors, signature)


def _packed(tensors: Sequence[Tensor], signature: Signature) -> tuple[Sequence[Tensor], str]:
    """The rows of these tensors, and their key. Raises InferenceRequestError if their lengths do not fit together."""
    rows_format = signature.model.input_rows
    try:
        rows = rows_format.pack(tensors)
        return rows.unbind(), rows_format.key(rows)
    except BundleError as error:
        raise InferenceRequestError(f"the inputs do not fit together: {error}") from error


def _raw_row(body: bytes, signature: Signature) -> tuple[Sequence[Tensor], str]:
    """The row of a request without JSON, for a model with one input of fixed dimensions."""
    model = signature.model
    if len(model.inputs) > 1 or model.input_rows.varies:
        names = [spec.name for spec in model.inputs]
        raise InferenceRequestError(
            f"without JSON the shapes of the inputs are not known; the model's {_named('input', names)}: describe them in JSON"
        )
    spec: TensorSpec = model.inputs[0]
    shape = [1, *spec.shape[1:]]
    tensor = {"name": spec.name, "datatype": DATATYPES[spec.dtype], "shape": shape}
    return _rows([(tensor, memoryview(body))], signature)


def _outputs(outputs: object, binary: bool, signature: Signature) -> list[OutputOptions]:
    """The outputs to return, and how."""
    specs = signature.model.outputs
    names = [spec.name for spec in specs]
    if outputs is None or outputs == []:
        outputs = [{"name": name} for name in names]
    if not isinstance(outputs, list):
        raise InferenceRequestError("`outputs` must be a list of objects, each with a `name`")
    wanted = [_object(output, "member of `outputs`") for output in outputs]
    for output in wanted:
        if output.get("name") not in names:
            raise InferenceRequestError(
                f"there is no output {abbreviated(output.get('name'))}; the model's only {_named('output', names)}"
            )
    for name in names:
        if (times := sum(output["name"] == name for output in wanted)) > 1:
            raise InferenceRequestError(f"the output {name!r} is requested {times} times; expected once")
    return [_output_options(output, names.index(output["name"]), binary, signature) for output in wanted]


def _output_options(output: Mapping[str, Any], index: int, binary: bool, signature: Signature) -> OutputOptions:
    spec = signature.model.outputs[index]
    parameters = _object(output.get("parameters"), f"`parameters` of output {spec.name!r}")
    if "shared_memory_region" in parameters:
        raise InferenceRequestError("shared memory is not supported; read the data from the response")
    classes = parameters.get("classification", 0)
    if type(classes) is not int or classes < 0:
        raise InferenceRequestError(
            f"`classification` is {abbreviated(classes)}; expected the number of classes to return"
        )
    if classes and not signature.num_classes:
        raise InferenceRequestError("`classification` needs labels, which this model does not have; omit it")
    found = OutputOptions(index, min(classes, signature.num_classes), _flag(parameters, "binary_data", binary))
    if DATATYPES[spec.dtype] in BINARY_ONLY and not found.binary:
        raise InferenceRequestError(
            f"the output {spec.name!r} is {DATATYPES[spec.dtype]}, which JSON cannot express; ask for binary data with "
            "`binary_data` in its `parameters`, or `binary_data_output` in those of the request"
        )
    return found


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
