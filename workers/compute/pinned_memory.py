"""Pins the shared memory in which outputs are produced and inputs arrive, so that a GPU writes and reads it directly.

Not run on a GPU yet: tests/integration/test_gpu_stages.py does it with `make gpu`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

_READ_ONLY = 8
"""cudaHostRegisterReadOnly, for memory of another process. Not every device supports it."""


class PinnedMemory:
    """Registers memory with CUDA until this fails once. Memory that is not pinned works too: the processor copies then.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._works = {0: True, _READ_ONLY: True}

    def register(self, address: int, size: int, is_writable: bool = True) -> Callable[[], None]:
        """Pin `size` bytes. Returns what ends that, to call before the memory is freed. Any thread may call both."""
        flags = 0 if is_writable else _READ_ONLY
        pinned = self._works[flags] and self._call("cudaHostRegister", address, size, flags)
        self._works[flags] &= pinned

        def unpin() -> None:
            if pinned:
                self._call("cudaHostUnregister", address)

        return unpin

    def _call(self, function: str, *arguments: int) -> bool:
        try:
            with torch.cuda.device(self._device):
                torch.cuda.check_error(getattr(torch.cuda.cudart(), function)(*arguments))  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - torch does not document which
            logger.warning("%s%s failed, copies are slower: %s", function, arguments, error)
            # CUDA keeps the error until the next check, which torch does after each kernel: otherwise that would be the next batch's.
            with contextlib.suppress(Exception):
                torch.zeros(1, device=self._device)
            return False
        return True
