"""Parses inference requests: JSON, JSON followed by binary data, or one raw tensor.

gRPC has another encoding of the same request: it calls `infer_request` with what it has decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from pydantic_core import from_json
from torch import Tensor

from multiworld_serving.common.service.errors import InferenceRequestError
from multiworld_serving.models.errors import BundleError
from multiworld_serving.server.frontend.api.inference import InferRequest, OutputOptions
from multiworld_serving.server.frontend.api.oip.image_input import image_input
from multiworld_serving.server.frontend.api.oip.metadata import Signature
from multiworld_serving.server.frontend.api.oip.objects import object_inputs
from multiworld_serving.server.frontend.api.oip.tensors import (
    DATATYPES,
    InputTensor,
    abbreviated,
    check_equal_rows,
    input_tensor,
)

MAX_VALUES = 1_000_000
MAX_FIELDS = 20_000
"""Parsing holds the GIL and so blocks the frontend's event loop: about 50 ms for this many values, but seconds for a body full of
lists and fields. Counting commas, brackets and colons limits it before parsing. Sixty-four images as nested lists, as large as
the limit of values allows, have 14,000 lists."""


class OutputParameters(Struct, frozen=True):
    """How to return an output; see `OutputOptions`."""

    classification: Annotated[int, Meta(ge=0)] = 0
    binary_data: bool | None = None
    shared_memory_region: Any = None


class RequestedOutput(Struct, frozen=True):
    """One element of `outputs`."""

    name: str
    parameters: OutputParameters | None = None


class RequestParameters(Struct, frozen=True):
    """The parameters of a request that mean something here; others are ignored.

    Attributes:
        timeout: microseconds; 0 = no timeout, as in Triton.
    """

    timeout: Annotated[int, Meta(ge=0)] = 0
    binary_data_output: bool = False
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False


class InferBody(Struct, frozen=True):
    """A request as the protocol describes it in JSON."""

    inputs: Annotated[list[InputTensor], Meta(min_length=1)]
    outputs: list[RequestedOutput] | None = None
    parameters: RequestParameters | None = None
    id: str | None = None


def parse_infer_request(body: bytes, json_bytes: int | None, signature: Signature) -> InferRequest:
    """Parse the body.

    Args:
        json_bytes: length of the JSON at the start, from `Inference-Header-Content-Length`; 0 = the body is one image and the
            response is binary; None = the whole body is JSON.
    Raises:
        InferenceRequestError: the request is invalid for this model.
    """
    if json_bytes == 0 and signature.model.pipeline is not None:
        raise InferenceRequestError("a request without JSON is for models of one input; send this body to /predict")
    if json_bytes == 0:
        outputs = [OutputOptions(index, binary=True) for index in range(len(signature.model.outputs))]
        return InferRequest(*_raw_row(body, signature), outputs)
    if json_bytes is not None and json_bytes > len(body):
        raise InferenceRequestError(
            f"Inference-Header-Content-Length is {json_bytes}, but the body has only {len(body)} bytes"
        )
    binary = None if json_bytes is None else memoryview(body)[json_bytes:]
    return infer_request(_json(body[:json_bytes]), signature, binary)


def _json(data: bytes) -> object:
    values, fields = data.count(b","), data.count(b"[") + data.count(b"{") + data.count(b":")
    if values > MAX_VALUES or fields > MAX_FIELDS:
        raise InferenceRequestError(
            f"the JSON has more than {MAX_VALUES} values or {MAX_FIELDS} lists and fields; "
            "send the numbers as binary data"
        )
    try:
        return from_json(data, allow_inf_nan=True, cache_strings="keys")
    except ValueError as error:
        raise InferenceRequestError(
            f"the body is not valid JSON ({error}); if binary data follows the JSON, Inference-Header-Content-Length must be "
            "the length of the JSON"
        ) from error


def infer_request(request: object, signature: Signature, binary: memoryview | None = None) -> InferRequest:
    """The request for the model.

    Args:
        request: as the protocol describes it in JSON, parsed.
        binary: the data after the JSON; None = there can be none.
    Raises:
        InferenceRequestError: the request is invalid for this model.
    """
    try:
        asked = msgspec.convert(request, InferBody)
    except msgspec.ValidationError as error:
        raise InferenceRequestError(
            f"the request is invalid: {error}; GET /v2/models/{signature.model.name} describes the inputs"
        ) from error
    is_pipeline = signature.model.pipeline is not None
    if not is_pipeline:
        given = [tensor.name for tensor in asked.inputs]
        _check_names("input", given, [spec.name for spec in signature.model.inputs], least=1)
    if any(tensor.parameters and tensor.parameters.shared_memory_region is not None for tensor in asked.inputs):
        raise InferenceRequestError("shared memory is not supported; send the data in the request")
    _assign_binary_data(asked, binary)
    parameters = asked.parameters or RequestParameters()
    if parameters.sequence_id or parameters.sequence_start or parameters.sequence_end:
        raise InferenceRequestError("the parameters `sequence_…` are for stateful models; omit them")
    outputs = _outputs(asked.outputs, parameters.binary_data_output, signature)
    rows: Tensor | Sequence[bytes]
    if is_pipeline:
        rows, key = object_inputs(asked.inputs, signature)
    elif signature.model.image is not None:
        rows, key = image_input(asked.inputs[0], signature), ""
    else:
        rows, key = _rows(asked.inputs, signature)
    return InferRequest(rows, key, outputs, asked.id or None, parameters.timeout / 1e6 or None)


def _check_names(kind: str, given: Sequence[str], names: Sequence[str], *, least: int) -> None:
    """Raise InferenceRequestError unless each of the model's names is given at least so often, and at most once."""
    for name in given:
        if name not in names:
            raise InferenceRequestError(
                f"there is no {kind} {abbreviated(name)}; the model's only {_named(kind, names)}"
            )
    for name in names:
        if not least <= (times := given.count(name)) <= 1:
            raise InferenceRequestError(f"the {kind} {name!r} is given {times} times; expected once")


def _named(kind: str, names: Sequence[str]) -> str:
    """ "input is 'a'", or "inputs are 'a', 'b'"."""
    listed = ", ".join(map(repr, names))
    return f"{kind} is {listed}" if len(names) == 1 else f"{kind}s are {listed}"


def _assign_binary_data(asked: InferBody, binary: memoryview | None) -> None:
    """Give each input with a `binary_data_size` its part of the binary data that follow the JSON."""
    sized = [(each, each.parameters.binary_data_size) for each in asked.inputs if each.parameters is not None]
    given = [(tensor, size) for tensor, size in sized if size is not None]
    for tensor, _ in given:
        if tensor.data is not None:
            raise InferenceRequestError(
                f"the input {tensor.name!r} has both `data` and `binary_data_size`; give one of them"
            )
    sizes, data = [size for _, size in given], binary or memoryview(b"")
    if sum(sizes) != data.nbytes or min(sizes, default=0) < 0:
        follow = (
            "none, since Inference-Header-Content-Length is missing" if binary is None else f"{binary.nbytes} bytes"
        )
        declared = f"have `binary_data_size` {abbreviated(sizes)}" if sizes else "have no `binary_data_size`"
        raise InferenceRequestError(f"the inputs {declared}, but after the JSON there are {follow}")
    for tensor, size in given:
        tensor.data, data = data[:size], data[size:]


def _rows(inputs: Sequence[InputTensor], signature: Signature) -> tuple[Tensor, str]:
    """The input rows, and their key."""
    model = signature.model
    by_name = {tensor.name: tensor for tensor in inputs}
    tensors = [input_tensor(by_name[spec.name], spec, model.dimensions, signature.max_rows) for spec in model.inputs]
    for spec, tensor in zip(model.inputs, tensors, strict=True):
        if signature.finite and not tensor.isfinite().all().item():
            raise InferenceRequestError(f"the input {spec.name!r} contains NaN or infinity; expected finite values")
    check_equal_rows({spec.name: len(tensor) for spec, tensor in zip(model.inputs, tensors, strict=True)})
    try:
        rows = model.input_rows.pack(tensors)
        return rows, model.input_rows.key(rows)
    except BundleError as error:
        raise InferenceRequestError(f"the inputs do not fit together: {error}") from error


def _raw_row(body: bytes, signature: Signature) -> tuple[Tensor, str]:
    """The row of a request without JSON, for a model with one input of fixed dimensions."""
    model = signature.model
    if len(model.inputs) > 1 or model.input_rows.varies:
        names = [spec.name for spec in model.inputs]
        raise InferenceRequestError(
            f"without JSON the shapes of the inputs are not known; the model's {_named('input', names)}: describe them in JSON"
        )
    spec = model.inputs[0]
    shape = [1, *(dim for dim in spec.shape[1:] if isinstance(dim, int))]
    return _rows([InputTensor(spec.name, DATATYPES[spec.dtype], shape, data=memoryview(body))], signature)


def _outputs(wanted: Sequence[RequestedOutput] | None, binary: bool, signature: Signature) -> list[OutputOptions]:
    """The outputs to return, and how."""
    if signature.model.pipeline is not None:
        asked = wanted or [RequestedOutput("")]
        return [OutputOptions(-1, 0, _is_binary(output.parameters, binary), output.name) for output in asked]
    names = [spec.name for spec in signature.model.outputs]
    wanted = wanted or [RequestedOutput(name) for name in names]
    _check_names("output", [output.name for output in wanted], names, least=0)
    return [_output_options(output, names.index(output.name), binary, signature) for output in wanted]


def _output_options(output: RequestedOutput, index: int, binary: bool, signature: Signature) -> OutputOptions:
    parameters = output.parameters or OutputParameters()
    if parameters.shared_memory_region is not None:
        raise InferenceRequestError("shared memory is not supported; read the data from the response")
    if parameters.classification and not signature.model.labels:
        raise InferenceRequestError("`classification` needs labels, which this model does not have; omit it")
    classes = min(parameters.classification, len(signature.model.labels))
    return OutputOptions(index, classes, _is_binary(parameters, binary))


def _is_binary(parameters: OutputParameters | None, default: bool) -> bool:
    return default if parameters is None or parameters.binary_data is None else parameters.binary_data
