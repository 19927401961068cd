"""Reads a safetensors file that is in memory without copying its tensors."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from multiworld_serving.models.errors import WeightsError

_LENGTH = struct.Struct("<Q")
_ALIGNED_BYTES = 64
"""Alignment of the first tensor in a file that is sent. With less, some processors compute other roundings than for the whole model."""
_MAX_HEADER_BYTES = 100 << 20
METADATA = "__metadata__"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Element types by their names in safetensors files."""


def safetensors_head(entries: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file. The bytes of the tensors follow in the order of `entries`.

    Args:
        entries: element type by its name in `DTYPES`, shape, and number of bytes.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)}
    at = 0
    for key, (dtype, shape, size) in entries.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": (at, at + size)}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNED_BYTES)
    return _LENGTH.pack(len(text)) + text


def received_tensors(file: bytearray) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, and its metadata. The tensors share memory with `file`, except those that are not aligned.

    Raises:
        WeightsError: it is not such a file.
    """
    header, start = _header(file)
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise WeightsError("the received weights have invalid metadata")
    tensors, end = {}, 0
    for key, entry in header.items():
        match entry:
            case {"dtype": str(name), "shape": [*shape], "data_offsets": [int(first), int(last)]} if name in DTYPES:
                dtype = DTYPES[name]
                valid = all(type(dim) is int and dim >= 0 for dim in shape) and first == end
                if valid and last - first == dtype.itemsize * math.prod(shape) and start + last <= len(file):
                    tensors[key] = _tensor(file, dtype, shape, start + first)
                    end = last
                    continue
        raise WeightsError(f"the received weights describe {key[:60]!r} as {str(entry)[:100]}")
    if start + end != len(file):
        raise WeightsError(f"the received weights have {len(file) - start} bytes of tensors; expected {end}")
    return tensors, metadata


def _header(file: bytearray) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors begin."""
    if len(file) < _LENGTH.size:
        raise WeightsError("the received weights are empty")
    (length,) = _LENGTH.unpack_from(file)
    start = _LENGTH.size + length
    if length > _MAX_HEADER_BYTES or start > len(file):
        raise WeightsError(f"the received weights have a header of {length} bytes in a file of {len(file)}")
    try:
        header = json.loads(bytes(memoryview(file)[_LENGTH.size : start]))
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"the received weights have a header that is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise WeightsError("the received weights have a header that is not an object")
    return header, start


def _tensor(file: bytearray, dtype: torch.dtype, shape: list[int], offset: int) -> Tensor:
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    if offset % dtype.itemsize:
        size = count * dtype.itemsize
        return torch.frombuffer(bytearray(memoryview(file)[offset : offset + size]), dtype=dtype).view(shape)
    return torch.frombuffer(file, dtype=dtype, count=count, offset=offset).view(shape)
