"""The weights of a stage as a leader sends them: bytes of which only a part is in memory at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from multiworld_serving.models.weights.tensor_file import TensorEntry, TensorFile

_CHUNK_BYTES = 4 << 20


class StageWeights:
    """A beginning in memory, and ranges of a file.

    Attributes:
        size: in bytes.
        sha256: in hexadecimal digits.
    Raises:
        OSError: the file cannot be read.
    """

    def __init__(self, head: bytes, file: TensorFile, ranges: Sequence[TensorEntry]) -> None:
        self._head = head
        self._file = file
        self._ranges = tuple(ranges)
        self.size = len(head) + sum(each.size for each in ranges)
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk.numpy().data)
        self.sha256 = digest.hexdigest()

    def chunks(self) -> Iterator[Tensor]:
        """The bytes in chunks to send, uint8 [N] each. Reads each when it is asked for.

        Raises:
            OSError: the file cannot be read, or has become shorter.
        """
        chunk = bytearray(self._head)
        for each in self._ranges:
            for at in range(0, each.size, _CHUNK_BYTES):
                expected = min(_CHUNK_BYTES, each.size - at)
                found = os.pread(self._file.fileno(), expected, each.offset + at)
                if len(found) < expected:
                    raise OSError("a file with weights has become shorter; load the version again")
                chunk += found
                if len(chunk) >= _CHUNK_BYTES:
                    yield torch.frombuffer(chunk, dtype=torch.uint8)
                    chunk = bytearray()
        if chunk:
            yield torch.frombuffer(chunk, dtype=torch.uint8)
