"""Batches brought to the device, and results from it: on a GPU beside what it computes, by copies of its own through pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor


class Transfers(Protocol):
    """Between a device and the memory that sockets read and write."""

    def up(self, batch: Tensor) -> Callable[[], Tensor]:
        """Begin to bring a batch to the device. What this gives is called on the computing thread, for the batch that is there."""
        ...

    def down(self, output: Tensor) -> Tensor:
        """The output of what was just begun on the computing thread: in host memory, contiguous, and complete."""
        ...


def transfers(device: torch.device) -> Transfers:
    """For this device."""
    return _GpuTransfers(device) if device.type == "cuda" else _NoTransfers()


class _NoTransfers:
    def up(self, batch: Tensor) -> Callable[[], Tensor]:
        return lambda: batch

    def down(self, output: Tensor) -> Tensor:
        return output.contiguous()


class _GpuTransfers:
    """Copies that run beside computing need pinned memory, a stream of their own, and events that say who waits for whom; see "CUDA
    semantics" in PyTorch's notes. To take such memory may wait for the device, so that a thread of its own does it, and no event loop
    nor what computes. Written without a GPU at hand: tests/integration/test_gpu_stages.py checks it where there is one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._bringer = ThreadPoolExecutor(1, thread_name_prefix="bringer")

    def up(self, batch: Tensor) -> Callable[[], Tensor]:
        bringing = self._bringer.submit(self._bring, batch)

        def arrived() -> Tensor:
            there, copied = bringing.result()
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(copied)
            # Made on another stream, its memory would be given away as soon as that one has no use for it.
            there.record_stream(computing)
            return there

        return arrived

    def down(self, output: Tensor) -> Tensor:
        host = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        host.copy_(output, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return host

    def _bring(self, batch: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.stream(self._stream):
            there = batch.pin_memory().to(self._device, non_blocking=True)
            return there, self._stream.record_event()
