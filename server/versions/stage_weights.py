"""The weights of a stage as a leader sends them: a safetensors file of which only a part is in memory at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_CHUNK_BYTES = 4 << 20


class HasFileno(Protocol):
    """A file that is open as long as the object exists."""

    def fileno(self) -> int: ...


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file."""

    file: HasFileno
    offset: int
    size: int


class StageWeights:
    """A safetensors file made of a beginning in memory and ranges of files.

    Attributes:
        size: in bytes.
        sha256: in hexadecimal digits.
    Raises:
        OSError: a file cannot be read.
    """

    def __init__(self, head: bytes, ranges: Sequence[FileRange]) -> None:
        self._head = head
        self._ranges = tuple(ranges)
        self.size = len(head) + sum(each.size for each in ranges)
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk.numpy().data)
        self.sha256 = digest.hexdigest()

    def chunks(self) -> Iterator[Tensor]:
        """The file in chunks to send, uint8 [N] each. Reads each when it is asked for.

        Raises:
            OSError: a file cannot be read, or has become shorter.
        """
        buffer, filled, left = bytearray(min(_CHUNK_BYTES, self.size)), 0, self.size
        parts: tuple[bytes | FileRange, ...] = (self._head, *self._ranges)
        for part in parts:
            at, size = 0, len(part) if isinstance(part, bytes) else part.size
            while at < size:
                target = memoryview(buffer)[filled : filled + size - at]
                if isinstance(part, bytes):
                    count = len(target)
                    target[:] = part[at : at + count]
                elif (count := os.preadv(part.file.fileno(), [target], part.offset + at)) == 0:
                    raise OSError("a file with weights has become shorter; load the version again")
                at, filled, left = at + count, filled + count, left - count
                if filled == len(buffer):
                    yield torch.frombuffer(buffer, dtype=torch.uint8)
                    buffer, filled = bytearray(min(_CHUNK_BYTES, left)), 0
