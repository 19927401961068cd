"""CUDA streams, where there are any."""

import contextlib
from typing import Any

import torch


def on_stream(stream: Any) -> contextlib.AbstractContextManager[object]:
    """Work on this stream; None is where nothing runs on one."""
    return torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext()
