"""Helpers for CUDA streams. A stream of None means that there is no CUDA stream to use."""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Result = TypeVar("_Result")


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
