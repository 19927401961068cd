"""A file descriptor that is closed with the last reference to its object."""

from __future__ import annotations

import os
import weakref


class OpenFile:
    """Owns a descriptor. For files that many objects read at offsets, so that no one of them is the one to close it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def fileno(self) -> int:
        return self._descriptor
