"""Copies batches to the device and outputs back. On a GPU, copies overlap with computation, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor


class Transfers(Protocol):
    """Copies between host memory and a device."""

    def to_device(self, batch: Tensor) -> Callable[[], Tensor]:
        """Start copying a batch to the device. Call the result on the computing thread to get the copied batch."""
        ...

    def to_host(self, output: Tensor) -> Tensor:
        """Wait for the computation of `output` and return it in host memory, contiguous. Called on the computing thread."""
        ...


def transfers_for(device: torch.device) -> Transfers:
    """The implementation for this device."""
    return _GpuTransfers(device) if device.type == "cuda" else _CpuTransfers()


class _CpuTransfers:
    def to_device(self, batch: Tensor) -> Callable[[], Tensor]:
        return lambda: batch

    def to_host(self, output: Tensor) -> Tensor:
        return output.contiguous()


class _GpuTransfers:
    """Overlapping copies need pinned memory, a stream, and events for ordering; see "CUDA semantics" in PyTorch's notes. Allocating
    pinned memory may wait for the device, so a separate thread does it. tests/integration/test_gpu_stages.py needs a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="copy-to-device")

    def to_device(self, batch: Tensor) -> Callable[[], Tensor]:
        copy = self._copy_thread.submit(self._copy, batch)

        def arrived() -> Tensor:
            there, copied = copy.result()
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(copied)
            # Allocated on another stream: without this the allocator could reuse its memory too early.
            there.record_stream(computing)
            return there

        return arrived

    def to_host(self, output: Tensor) -> Tensor:
        host = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        host.copy_(output, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return host

    def _copy(self, batch: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.stream(self._stream):
            there = batch.pin_memory().to(self._device, non_blocking=True)
            return there, self._stream.record_event()
