"""An open safetensors file: the weights of a bundle."""

from __future__ import annotations

import json
import os
import struct
import weakref
from functools import cached_property
from typing import Any, NamedTuple

from safetensors import safe_open

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"


class TensorEntry(NamedTuple):
    """Where a tensor is in a file.

    Attributes:
        offset, size: in bytes.
    """

    offset: int
    size: int


class TensorFile:
    """Owns a descriptor, which is closed with the last reference to this object.

    `entries` and `tensors` raise SafetensorError for a file of another format, and OSError.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def fileno(self) -> int:
        """The descriptor, open as long as this object exists."""
        return self._descriptor

    def tensors(self) -> Any:
        """A context manager. Its `get_tensor` maps a tensor by key."""
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
            key: TensorEntry(start + begin, end - begin)
            for key, entry in header.items()
            if key != _METADATA
            for begin, end in (entry["data_offsets"],)
        }
