"""An open safetensors file: the weights of a bundle, or of a stage that a worker receives."""

from __future__ import annotations

import json
import os
import struct
import weakref
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

from safetensors import safe_open

_LENGTH = struct.Struct("<Q")
_ALIGNED_BYTES = 64
"""Alignment of the first tensor in a file that is sent. With less, some processors compute other roundings than for the whole model."""
METADATA = "__metadata__"


class TensorEntry(NamedTuple):
    """Where a tensor is in a file.

    Attributes:
        dtype: as safetensors names it.
        offset, size: in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class TensorFile:
    """Owns a descriptor, which is closed with the last reference to this object.

    `entries` and `tensors` raise SafetensorError for a file of another format, and OSError.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def in_memory(cls, content: bytes = b"") -> TensorFile:
        """A file without a path, to write into."""
        file = cls(os.memfd_create("multiworld-weights"))
        file.write(content, 0)
        return file

    def write(self, content: bytes | memoryview, at: int) -> None:
        """Write at this offset. Raises OSError."""
        left = memoryview(content)
        while left:
            count = os.pwrite(self._descriptor, left, at)
            left, at = left[count:], at + count

    def fileno(self) -> int:
        """The descriptor, open as long as this object exists."""
        return self._descriptor

    @property
    def size(self) -> int:
        """In bytes."""
        return os.fstat(self._descriptor).st_size

    def tensors(self) -> Any:
        """A context manager whose `get_tensor` maps a tensor by key, and whose `metadata` returns texts."""
        return safe_open(f"/proc/self/fd/{self._descriptor}", framework="pt")

    @cached_property
    def entries(self) -> dict[str, TensorEntry]:
        """Where each tensor is, by key."""
        with self.tensors():
            pass  # checks the header
        (length,) = _LENGTH.unpack(os.pread(self._descriptor, _LENGTH.size, 0))
        header = json.loads(os.pread(self._descriptor, length, _LENGTH.size))
        start = _LENGTH.size + length
        return {
            key: TensorEntry(entry["dtype"], tuple(entry["shape"]), start + begin, end - begin)
            for key, entry in header.items()
            if key != METADATA
            for begin, end in (entry["data_offsets"],)
        }


def file_head(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a safetensors file. The bytes of the tensors follow in the order of `entries`."""
    header: dict[str, Any] = {METADATA: dict(metadata)}
    at = 0
    for key, entry in entries.items():
        header[key] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (at, at + entry.size)}
        at += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNED_BYTES)
    return _LENGTH.pack(len(text)) + text
