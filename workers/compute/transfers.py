"""Copies batches to the device and outputs back. On a GPU, copies overlap with computation, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

_LARGEST_FLOAT16 = torch.finfo(torch.float16).max
Allocate: TypeAlias = Callable[[Sequence[int], torch.dtype], Tensor]
"""Returns an uninitialized contiguous tensor of this shape and dtype. May be called on any thread."""


class Transfers(Protocol):
    """Copies between host memory and a device."""

    def to_device(self, batch: Tensor) -> Callable[[], Tensor]:
        """Start copying a batch to the device. Call the result on the computing thread to get the copied batch."""
        ...

    def to_host(self, output: Tensor, dtype: torch.dtype | None = None, allocate: Allocate | None = None) -> Tensor:
        """Wait for the computation of `output` and return it in host memory, contiguous. Called on the computing thread.

        Args:
            dtype: of the result; None: that of the output.
            allocate: makes the memory for the result; None: any memory.
        """
        ...


def _in_range(output: Tensor, dtype: torch.dtype) -> Tensor:
    """Limit the values to those of float16 if they are converted to it: infinity would become NaN in the next stage."""
    if dtype != torch.float16 or output.dtype == torch.float16:
        return output
    return output.clamp(-_LARGEST_FLOAT16, _LARGEST_FLOAT16)


def transfers_for(device: torch.device) -> Transfers:
    """The implementation for this device."""
    return _GpuTransfers(device) if device.type == "cuda" else _CpuTransfers()


class _CpuTransfers:
    def to_device(self, batch: Tensor) -> Callable[[], Tensor]:
        return lambda: batch

    def to_host(self, output: Tensor, dtype: torch.dtype | None = None, allocate: Allocate | None = None) -> Tensor:
        dtype = dtype or output.dtype
        output = _in_range(output, dtype)
        if allocate is None:
            return output.to(dtype).contiguous()
        return allocate(output.shape, dtype).copy_(output)


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

    def to_host(self, output: Tensor, dtype: torch.dtype | None = None, allocate: Allocate | None = None) -> Tensor:
        dtype = dtype or output.dtype
        output = _in_range(output, dtype).to(dtype)
        # Only pinned memory is copied to without blocking, and segments of shared memory are not pinned.
        host = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
        host.copy_(output, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return host

    def _copy(self, batch: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        with torch.cuda.stream(self._stream):
            there = batch.pin_memory().to(self._device, non_blocking=True)
            return there, self._stream.record_event()
