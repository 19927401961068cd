"""Inputs and outputs of any model, as binary data of the Open Inference Protocol. No I/O.

Arrays are numpy arrays or torch tensors; the caller has imported these libraries, and answers are numpy arrays.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

import httpx

from multiworld_client.codec import HEADER_LENGTH, PreparedRequest, parsing, tensor_request
from multiworld_client.errors import InputError
from multiworld_client.inputs import TensorInput, as_array

_DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}
_DTYPES = {datatype: name for name, datatype in _DATATYPES.items()}


def infer_request(inputs: Mapping[str, object], model: str, request_id: str | None) -> PreparedRequest:
    """The request for a batch of samples. Raises InputError if an input cannot be sent."""
    if not inputs:
        raise InputError("there are no inputs; pass a dict of arrays by name")
    tensors = {name: _tensor(name, value) for name, value in inputs.items()}
    return tensor_request(model, tensors, request_id, parameters={"binary_data_output": True})


def _tensor(name: str, value: object) -> TensorInput:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:  # numpy has no bfloat16
        bits = value.detach().cpu().contiguous().view(torch.int16).numpy()
        return TensorInput("BF16", tuple(map(int, bits.shape)), bits.tobytes())
    array = as_array(value)
    if array is None or str(array.dtype) not in _DATATYPES:
        found = type(value).__name__ if array is None else f"an array of {array.dtype}"
        raise InputError(f"the input {name!r} is {found}; pass a numpy array or a torch tensor of numbers or booleans")
    return TensorInput(_DATATYPES[str(array.dtype)], tuple(map(int, array.shape)), array.tobytes())


def outputs(response: httpx.Response) -> dict[str, Any]:
    """Parse a successful answer: numpy arrays by name; BF16 becomes float32. Raises ProtocolError if it cannot be parsed."""
    import numpy as np  # noqa: PLC0415 - only callers of `infer` need it

    with parsing(response):
        length = int(response.headers[HEADER_LENGTH])
        data, at, found = response.content, length, {}
        for output in json.loads(data[:length])["outputs"]:
            start, at = at, at + int(output["parameters"]["binary_data_size"])
            shape, datatype = [int(size) for size in output["shape"]], str(output["datatype"])
            dtype = np.dtype("uint16" if datatype == "BF16" else _DTYPES[datatype])
            if at > len(data) or at - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{at - start} bytes for {datatype} {shape}")
            array = np.frombuffer(data[start:at], dtype=dtype).reshape(shape).copy()
            if datatype == "BF16":
                array = (array.astype(np.uint32) << 16).view(np.float32)
            found[str(output["name"])] = array
        return found
