"""Helpers for CUDA streams. A stream of None means that there is no CUDA stream to use."""

import contextlib
from typing import Any

import torch


def on_stream(stream: Any) -> contextlib.AbstractContextManager[object]:
    """A context in which `stream` is the current CUDA stream; no effect if None."""
    return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()


def await_queued(stream: Any) -> None:
    """Block until the work that is queued on `stream` now is done; later work is not awaited. No effect if None."""
    if stream is not None:
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record(stream)
        done.synchronize()
