"""All that the library asks of CUDA, besides NCCL. A stream of None means that there is no CUDA stream to use. Not run on a GPU yet.

Tests replace these functions: see tests/fakes/gpu.py.
"""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_Result = TypeVar("_Result")


def host_copy(tensor: Tensor, *, load: bool) -> Tensor:
    """Return a new contiguous tensor on the host, pinned for a tensor on a GPU: such copies are faster and need no other buffer.

    Args:
        load: copy the data of `tensor`, after the work that is queued on the current stream. Blocks until it is copied.
    """
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor) if load else host


def copy_stream(device: torch.device) -> Any:
    """Return a stream for copies of tensors that the caller's current stream computes. Work that it queues later runs meanwhile."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def current_stream(device: torch.device) -> Any:
    """Return the caller's current stream."""
    return torch.cuda.current_stream(device)


def call_on(stream: Any, call: Callable[[], _Result]) -> _Result:
    """Call while `stream` is the current CUDA stream."""
    with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
        return call()


def await_queued(stream: Any) -> None:
    """Block until the work that is queued on `stream` now is done; later work is not awaited. No effect if None."""
    if stream is not None:
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(stream)
        done.synchronize()
