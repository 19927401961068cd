"""Copies batches to the device and outputs back. On a GPU, copies use pinned memory, and those to it overlap with computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

import torch
from torch import Tensor

Allocate: TypeAlias = Callable[[Sequence[int], torch.dtype], Tensor]
"""Returns an uninitialized contiguous tensor of this shape and dtype. May be called on any thread."""


class Transfers:
    """Copies between host memory and the device."""

    def to_device(self, batch: Tensor) -> Callable[[], Tensor]:
        """Start copying a batch to the device. Call the result on the computing thread to get the copied batch."""
        return lambda: batch

    def writable(self, batch: Tensor) -> Tensor:
        """Return a batch in memory that a stage in Python may change."""
        return batch

    def to_host(
        self, output: Tensor, float32_as: torch.dtype = torch.float32, allocate: Allocate | None = None
    ) -> Tensor:
        """Wait for the computation of `output` and return it in host memory, contiguous. Arguments are those of `start_to_host`."""
        return self.start_to_host(output, float32_as, allocate)()

    def start_to_host(
        self, output: Tensor, float32_as: torch.dtype = torch.float32, allocate: Allocate | None = None
    ) -> Callable[[], Tensor]:
        """Start copying `output` to host memory, contiguous. Called on the computing thread.

        The result must be called, on that thread, too. It waits for the computation and the copy.

        Args:
            float32_as: dtype of the result if the output is float32; other outputs keep theirs.
            allocate: makes the memory for the result; None: any memory.
        """
        dtype = float32_as if output.dtype == torch.float32 else output.dtype
        if dtype != output.dtype:  # infinity would become NaN in the next stage
            output = output.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        return self._copy_to_host(output, dtype, allocate)

    def _copy_to_host(self, output: Tensor, dtype: torch.dtype, allocate: Allocate | None) -> Callable[[], Tensor]:
        host = output.to(dtype).contiguous() if allocate is None else allocate(output.shape, dtype).copy_(output)
        return lambda: host


class GpuTransfers(Transfers):
    """Overlapping copies need pinned memory, a stream, and events for ordering; see "CUDA semantics" in PyTorch's notes. Allocating
    pinned memory may wait for the device, so a separate thread does it. tests/integration/test_gpu_stages.py needs a GPU.

    A batch in memory of its producer is pinned already. It may only be read there, and the producer uses this memory again when the batch
    is dropped. So the thread keeps the batch until it is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream, self._back = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._copy_thread = ThreadPoolExecutor(1, thread_name_prefix="copy-to-device")

    def to_device(self, batch: Tensor) -> Callable[[], Tensor]:
        copy = Future[tuple[Tensor, torch.cuda.Event]]()
        self._copy_thread.submit(self._copy, batch, copy)

        def arrived() -> Tensor:
            there, copied = copy.result()
            computing = torch.cuda.current_stream(self._device)
            computing.wait_event(copied)
            # Allocated on another stream: without this the allocator could reuse its memory too early.
            there.record_stream(computing)
            return there

        return arrived

    def writable(self, batch: Tensor) -> Tensor:
        return batch.clone()

    def _copy(self, batch: Tensor, copy: Future[tuple[Tensor, torch.cuda.Event]]) -> None:
        try:
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                pinned = batch if batch.is_pinned() else batch.pin_memory()
                there = pinned.to(self._device, non_blocking=True)
                copied.record(self._stream)
        except Exception as error:  # noqa: BLE001 - raised where the batch is needed
            copy.set_exception(error)
            return
        copy.set_result((there, copied))
        copied.synchronize()

    def _copy_to_host(self, output: Tensor, dtype: torch.dtype, allocate: Allocate | None) -> Callable[[], Tensor]:
        # A CUDA graph writes its next output over this one, which is copied meanwhile.
        there = torch.empty_like(output, dtype=dtype, memory_format=torch.contiguous_format).copy_(output)
        host = None if allocate is None else allocate(there.shape, dtype)
        if host is None or not host.is_pinned():  # small, no shared memory is left, or it cannot be pinned
            host = torch.empty(there.shape, dtype=dtype, pin_memory=True)
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._back):
            host.copy_(there, non_blocking=True)
            copied.record(self._back)

        def finish() -> Tensor:
            copied.synchronize()
            nonlocal there  # kept until here: its memory must not be used again earlier
            del there
            return host

        return finish
