"""Parts of CUDA for tests without a GPU: TF32, errors of a device, and a backend of NCCL."""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import ErrorType
from torch.utils._python_dispatch import TorchDispatchMode

from multiworld.collectives import nccl
from multiworld_serving.models.optimize import optimizing, tuning
from multiworld_serving.models.optimize.tuning import ExecutionMode

CUDA = torch.device("cuda", 0)
ILLEGAL_ACCESS = RuntimeError("CUDA error: an illegal memory access was encountered")
_TF32_BITS = 10
_FLOAT32_BITS = 23
aten = torch.ops.aten


class Tf32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes convolutions and matrix products of float32 as a GPU does: in TF32 while the flag of their library is set."""

    _LIBRARIES: Mapping[Any, Any] = {
        aten.convolution.default: torch.backends.cudnn,
        aten.conv2d.default: torch.backends.cudnn,  # in inference mode
        aten.linear.default: torch.backends.cuda.matmul,
        aten.mm.default: torch.backends.cuda.matmul,
        aten.addmm.default: torch.backends.cuda.matmul,
        aten.bmm.default: torch.backends.cuda.matmul,
    }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library = self._LIBRARIES.get(func)
        if library is not None and library.allow_tf32:
            factors = 3 if func is aten.addmm.default else 2
            args = (*(_rounded(each) for each in args[:factors]), *args[factors:])
        return func(*args, **(kwargs or {}))


def _rounded(tensor: Tensor) -> Tensor:
    """float32 values rounded to the mantissa of TF32, to nearest."""
    if tensor.dtype != torch.float32:
        return tensor
    dropped = _FLOAT32_BITS - _TF32_BITS
    bits = tensor.contiguous().view(torch.int32) + (1 << (dropped - 1))
    return (bits & -(1 << dropped)).view(torch.float32).view(tensor.shape)


def use_processor_with_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is computed in an execution mode runs as on a GPU with TF32. All else, such as references, runs as on a processor."""
    active = ExecutionMode.active

    @contextmanager
    def on_gpu(mode: ExecutionMode, _: torch.device) -> Iterator[None]:
        with active(mode, CUDA), Tf32():  # type: ignore[no-untyped-call]
            yield

    assert torch.backends.cudnn.allow_tf32, "the default of torch"
    monkeypatch.setattr(ExecutionMode, "active", on_gpu)
    monkeypatch.setattr(optimizing, "fusable", lambda *_: False)
    monkeypatch.setattr(tuning, "has_tf32", lambda _: True)


class FakeNccl:
    """The backend of NCCL, and the group that has it. A test decides when its members connect, and when operations and aborts end.

    Attributes:
        environment: what torch would have read when the group was made.
        connecting, aborting: set when these calls begin.
        peers, abort_ends: `eager_connect_single_device` and `abort` last until these are set. An abort sets `peers`.
        error: what the watchdog of torch has found.
        timeouts: all timeouts that the code under test has set, in seconds.
    """

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None)

    def __init__(self, *_: object) -> None:
        self.environment = dict(os.environ)
        self.connecting, self.aborting = threading.Event(), threading.Event()
        self.peers, self.abort_ends = threading.Event(), threading.Event()
        self.abort_ends.set()
        self.abort_error: Exception | None = None
        self.error = ErrorType.SUCCESS
        self.timeouts: list[float] = []
        self.works = Queue[FakeWork]()

    def _register_backend(self, *_: object) -> None:
        pass

    def _get_backend(self, device: torch.device) -> "FakeNccl":
        assert device.type == "cuda"
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeouts.append(timeout.total_seconds())

    def eager_connect_single_device(self, _: torch.device) -> None:
        self.connecting.set()
        self.peers.wait()
        if self.aborting.is_set():
            raise RuntimeError("NCCL communicator was aborted on rank 0.")

    def abort(self) -> None:
        self.aborting.set()
        self.peers.set()
        self.abort_ends.wait()
        if self.abort_error is not None:
            raise self.abort_error

    def get_error(self) -> ErrorType:
        return self.error

    def allreduce(self, _: list[Tensor]) -> "FakeWork":
        self.works.put(work := FakeWork())
        return work


class FakeWork:
    """An operation of `FakeNccl`, which runs until `done` is set. An event after it sets `queried` when it is asked."""

    def __init__(self) -> None:
        self.done, self.queried = threading.Event(), threading.Event()

    def is_completed(self) -> bool:
        pytest.fail("it holds Python's global lock while NCCL is aborted")

    def wait(self) -> None:
        _current.stream.works.append(self)


class FakeStream:
    """A stream of CUDA that waits for one operation."""

    device = CUDA

    def __init__(self, *_: object, **__: object) -> None:
        self.works: list[FakeWork] = []

    def record_event(self) -> SimpleNamespace:
        (work,) = self.works

        def query() -> bool:
            is_done = work.done.is_set()
            work.queried.set()
            return is_done

        return SimpleNamespace(query=query)


_current = threading.local()
"""Its stream is the current one of a thread."""


@contextmanager
def _on_stream(stream: FakeStream) -> Iterator[None]:
    _current.stream = stream
    yield


def use_fake_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of NCCL are fakes, and so are the streams."""
    for name in [each for each in os.environ if each.startswith("TORCH_NCCL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(nccl, "ProcessGroup", FakeNccl)
    monkeypatch.setattr(FakeNccl, "BackendType", SimpleNamespace(NCCL="nccl"), raising=False)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeNccl)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", _on_stream)
