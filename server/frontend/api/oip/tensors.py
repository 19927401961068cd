"""Converts the values of a tensor in a request, JSON or binary, to a tensor, and back.

Shape and data size are validated before memory is allocated. All functions are synchronous and stateless; they run on the decoding
threads. The errors name the input, what was expected, and what came.
"""

from __future__ import annotations

import math
import reprlib
from array import array
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from multiworld_serving.common.service.errors import InferenceRequestError
from multiworld_serving.models.bundle.manifest import TensorSpec

DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
}
"""The protocol's names of element types."""
_DTYPES = {datatype: getattr(torch, name) for name, datatype in DATATYPES.items()}
_TYPECODES = {"UINT8": "B", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "FP32": "f", "FP64": "d"}

_LENGTH_BYTES = 4

_short = reprlib.Repr()
_short.maxlevel, _short.maxlist, _short.maxstring, _short.maxother = 2, 8, 64, 64


def abbreviated(value: object) -> str:
    """A client's value for an error message, shortened without traversing all of it."""
    return _short.repr(value)


class InputParameters(Struct, frozen=True):
    """The parameters of an input that mean something here; others are ignored."""

    binary_data_size: int | None = None
    shared_memory_region: Any = None


class InputTensor(Struct):
    """An input as the request describes it.

    Attributes:
        data: its values: a list, flat or nested, or a memoryview of binary data.
    """

    name: str
    datatype: str
    shape: list[int]
    parameters: InputParameters | None = None
    data: Any = None


def check_rows(name: str, rows: int, most: int, what: str = "rows") -> None:
    """Raise InferenceRequestError unless the request may have this many rows."""
    if not 1 <= rows <= most:
        raise InferenceRequestError(
            f"the input {name!r} has {abbreviated(rows)} {what}; expected 1 to {most} in one request"
        )


def check_equal_rows(counts: Mapping[str, int]) -> None:
    """Raise InferenceRequestError unless the inputs, by name, have equal numbers of rows."""
    if len(set(counts.values())) > 1:
        raise InferenceRequestError(
            f"the inputs have different numbers of rows: {abbreviated(counts)}; expected equal ones"
        )


def input_tensor(
    tensor: InputTensor, spec: TensorSpec, dimensions: Mapping[str, tuple[int, int]], max_rows: int
) -> Tensor:
    """The values of an input of the model.

    Args:
        tensor: the input as the request describes it.
        dimensions: (least, most) length of each variable dimension.
    Returns:
        Of the type and shape that `spec` names; its memory belongs to no other.
    Raises:
        InferenceRequestError: the input is invalid for this model.
    """
    expected, shape = DATATYPES[spec.dtype], tensor.shape
    if tensor.datatype != expected and (tensor.datatype, expected) != ("INT32", "INT64"):
        raise InferenceRequestError(
            f"the input {spec.name!r} has datatype {abbreviated(tensor.datatype)}; the model takes {expected}"
        )
    wanted = ["N" if at == 0 else dim for at, dim in enumerate(spec.shape)]
    if len(shape) != len(wanted) or any(
        isinstance(dim, int) and dim != length for dim, length in zip(wanted, shape, strict=True)
    ):
        raise InferenceRequestError(
            f"the input {spec.name!r} has shape {abbreviated(shape)}; expected [{', '.join(map(str, wanted))}]"
        )
    check_rows(spec.name, shape[0], max_rows)
    for dim, length in zip(spec.shape[1:], shape[1:], strict=True):
        least, most = dimensions[dim] if isinstance(dim, str) else (0, math.inf)
        if not least <= length <= most:
            raise InferenceRequestError(
                f"the input {spec.name!r} has the length {abbreviated(length)} in the dimension {dim!r}; expected {least} to {most}"
            )
    return tensor_values(tensor).to(_DTYPES[expected])


def tensor_values(tensor: InputTensor) -> Tensor:
    """The values of an input as a tensor. Raises InferenceRequestError if they do not fit its datatype and shape."""
    if isinstance(tensor.data, memoryview):
        return _from_binary(tensor.name, tensor.datatype, tensor.shape, tensor.data)
    return _from_json(tensor.name, tensor.datatype, tensor.shape, json_data(tensor))


def json_data(tensor: InputTensor) -> list[Any]:
    """The values in `data`, flat. Raises InferenceRequestError if they are missing or do not fill the shape."""
    name, shape, data = tensor.name, tensor.shape, tensor.data
    if not isinstance(data, list):
        raise InferenceRequestError(
            f"the input {name!r} has no list `data`; send its values there, or after the JSON with `binary_data_size`"
        )
    level = data
    if data and isinstance(data[0], list):
        for axis, size in enumerate(shape[1:], 1):
            if not all(isinstance(part, list) and len(part) == size for part in level):
                raise InferenceRequestError(
                    f"the `data` of input {name!r} is nested, but not into lists of {size} everywhere at dimension {axis}"
                )
            level = list(chain.from_iterable(level))
    if len(level) != math.prod(shape):
        raise InferenceRequestError(
            f"the `data` of input {name!r} does not fill its shape {list(shape)}: it has {len(level)} values, expected "
            f"{math.prod(shape)}"
        )
    return level


def _from_json(name: str, datatype: str, shape: list[int], values: list[Any]) -> Tensor:
    """A tensor of as many values as its shape needs. Raises InferenceRequestError for values of another type."""
    kinds = set(map(type, values))
    integers = "INT" in datatype
    allowed: set[type] = {bool} if datatype == "BOOL" else {int} if integers else {int, float}
    if not kinds <= allowed:
        found = ", ".join(sorted(kind.__name__ for kind in kinds - allowed))
        what = "true or false" if datatype == "BOOL" else "whole numbers" if integers else "numbers"
        raise InferenceRequestError(f"the `data` of input {name!r} must be {what} for {datatype}, and has {found}")
    try:
        if datatype not in ("FP16", "BF16"):
            data = bytearray(values) if datatype == "BOOL" else array(_TYPECODES[datatype], values)
            return _tensor(datatype, shape, data)
        exact = _tensor("FP64", shape, array("d", values))
        rounded = exact.to(_DTYPES[datatype])
        if not rounded.isinf().equal(exact.isinf()):
            raise OverflowError
        return rounded
    except OverflowError as error:
        limits = torch.iinfo(_DTYPES[datatype]) if integers else None
        range_ = f"{limits.min} to {limits.max}" if limits else f"the range of {datatype}"
        raise InferenceRequestError(f"the input {name!r} of {datatype} has values outside {range_}") from error


def _from_binary(name: str, datatype: str, shape: list[int], data: memoryview) -> Tensor:
    """A tensor of values in little-endian, row-major order. Raises InferenceRequestError if their number is wrong."""
    expected = math.prod(shape) * _DTYPES[datatype].itemsize
    if data.nbytes != expected:
        raise InferenceRequestError(
            f"the input {name!r} of {datatype} {list(shape)} requires {expected} bytes of data, not {data.nbytes}"
        )
    if datatype == "BOOL" and data.nbytes and max(data) > 1:
        raise InferenceRequestError(f"the input {name!r} of BOOL has bytes other than 0 and 1")
    return _tensor(datatype, shape, bytearray(data))  # a copy, so that the body can be freed


def _tensor(datatype: str, shape: list[int], data: bytearray | array[Any]) -> Tensor:
    dtype = _DTYPES[datatype]
    return torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)


def bytes_elements(name: str, data: memoryview, count: int) -> list[bytes]:
    """The elements of BYTES in binary data. Raises InferenceRequestError unless there are as many."""
    found: list[bytes] = []
    at = 0
    for number in range(count):
        start = at + _LENGTH_BYTES
        end = start + int.from_bytes(data[at:start], "little")
        if start > len(data) or end > len(data):
            raise InferenceRequestError(
                f"element {number} of input {name!r} ends after its {len(data)} bytes of data; each element of BYTES is "
                "its length as 4 bytes, little-endian, followed by its content"
            )
        found.append(bytes(data[start:end]))
        at = end
    if at != len(data):
        raise InferenceRequestError(
            f"the input {name!r} has {len(data) - at} bytes of data left over after its {count} elements"
        )
    return found
