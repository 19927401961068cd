"""The Open Inference Protocol for pipelines in Python, whose inputs and outputs have any names, types and shapes.

Each index of the first dimension is a row: the first stage gets a `Request` with `inputs`. The results of the last stage are outputs by
name; a result that is not a dict is the output `output`. Texts, bytes and other objects, as JSON, are BYTES.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multiworld_serving.common.service.errors import InferenceRequestError, StageError
from multiworld_serving.common.service.predictor import Prediction
from multiworld_serving.models.bundle.manifest import TensorSpec
from multiworld_serving.models.bundle.nodes import BATCH
from multiworld_serving.models.stages.api import Request, Response
from multiworld_serving.models.stages.objects import OBJECT_ROWS, ObjectError
from multiworld_serving.models.stages.responses import as_json
from multiworld_serving.server.frontend.api.object_route import object_rows, objects_of
from multiworld_serving.server.frontend.api.oip.metadata import Signature
from multiworld_serving.server.frontend.api.oip.tensors import (
    DATATYPES,
    InputTensor,
    abbreviated,
    bytes_elements,
    check_equal_rows,
    check_rows,
    input_tensor,
    json_data,
)

ONLY_OUTPUT = "output"
_DTYPES = {datatype: name for name, datatype in DATATYPES.items()}


class NamedOutput(NamedTuple):
    """An output of a pipeline: the values of all rows, or the texts of BYTES."""

    name: str
    values: Tensor | list[bytes]
    shape: list[int]


def object_inputs(inputs: Sequence[InputTensor], signature: Signature) -> tuple[Tensor, str]:
    """The rows of a request, and their key. Raises InferenceRequestError for an invalid input."""
    if len({each.name for each in inputs}) < len(inputs):
        raise InferenceRequestError(f"an input is given twice: {abbreviated([each.name for each in inputs])}")
    found = {each.name: _values(each, signature.max_rows) for each in inputs}
    check_equal_rows({name: len(values) for name, values in found.items()})
    samples = zip(*found.values(), strict=True)
    rows = object_rows([Request(inputs=dict(zip(found, sample, strict=True))) for sample in samples])
    return rows, OBJECT_ROWS.key(rows)


def _values(tensor: InputTensor, max_rows: int) -> list[Any]:
    """The value of each row."""
    shape = tensor.shape
    if not shape or min(shape) < 0:
        raise InferenceRequestError(
            f"the input {tensor.name!r:.60} has the shape {abbreviated(shape)}; expected [N, …]"
        )
    check_rows(tensor.name, shape[0], max_rows)
    if tensor.datatype == "BYTES":
        elements = np.array(_elements(tensor), dtype=object).reshape(shape)
        return list(elements) if elements.ndim == 1 else [each.tolist() for each in elements]
    if tensor.datatype not in _DTYPES:
        known = ", ".join([*_DTYPES, "BYTES"])
        raise InferenceRequestError(
            f"the input {tensor.name!r:.60} is {abbreviated(tensor.datatype)}; expected {known}"
        )
    spec = TensorSpec(tensor.name[:60] or "input", _DTYPES[tensor.datatype], (BATCH, *shape[1:]))
    values = input_tensor(tensor, spec, {}, max_rows)
    if values.dtype == torch.bfloat16:
        return list(values)
    return list(values.numpy()) if values.dim() > 1 else values.tolist()


def _elements(tensor: InputTensor) -> list[bytes]:
    if isinstance(tensor.data, memoryview):
        return bytes_elements(tensor.name, tensor.data, int(np.prod(tensor.shape)))
    values = json_data(tensor)
    if not all(isinstance(each, str) for each in values):
        raise InferenceRequestError(f"the `data` of input {tensor.name!r:.60} must be texts for BYTES")
    return [each.encode() for each in values]


def object_outputs(prediction: Prediction, wanted: Sequence[str]) -> list[NamedOutput]:
    """The outputs with these names, or all.

    Raises:
        InvalidInputError: the pipeline does not accept a row.
        InferenceRequestError: there is no such output, or rows have outputs of different names or shapes.
        StageError: a result cannot be expressed.
    """
    rows = [_named(each) for each in objects_of(prediction)]
    names = list(rows[0])
    if any(each.keys() != rows[0].keys() for each in rows):
        raise InferenceRequestError("the rows have outputs of different names; send them in separate requests")
    if missing := [name for name in wanted if name not in names]:
        raise InferenceRequestError(
            f"there is no output {abbreviated(missing[0])}; the outputs are {abbreviated(names)}"
        )
    return [_output(name, [row[name] for row in rows]) for name in wanted or names]


def _named(result: Any) -> dict[str, Any]:
    if isinstance(result, Response):
        result = result.body
    return {str(name): value for name, value in result.items()} if isinstance(result, dict) else {ONLY_OUTPUT: result}


def _output(name: str, values: list[Any]) -> NamedOutput:
    if all(isinstance(each, bool | int | float | list | np.ndarray | Tensor) for each in values):
        try:
            tensors = [torch.as_tensor(np.asarray(each) if isinstance(each, list) else each) for each in values]
        except (TypeError, ValueError, RuntimeError, OverflowError):
            tensors = []  # lists of other objects
        if tensors and all(str(each.dtype).removeprefix("torch.") in DATATYPES for each in tensors):
            if len({(each.dtype, each.shape) for each in tensors}) > 1:
                raise InferenceRequestError(
                    f"the rows have the output {name!r:.60} in different shapes; send them in separate requests"
                )
            stacked = torch.stack(tensors)
            return NamedOutput(name, stacked, list(stacked.shape))
    return NamedOutput(name, [_text(each) for each in values], [len(values)])


def _text(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return value.encode("utf-8", "replace") if isinstance(value, str) else as_json(value)
    except ObjectError as error:
        raise StageError(f"the last stage returned {error}") from error
