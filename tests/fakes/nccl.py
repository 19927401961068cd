"""A backend of NCCL whose members, operations and aborts a test controls."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import Queue
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import ErrorType

from multiworld.collectives import nccl
from tests.fakes.gpu import GPU


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

    device = GPU

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
