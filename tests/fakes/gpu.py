"""A GPU in memory of the host. What is queued on a stream runs when somebody waits for the stream, so data is wrong without the wait."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from multiworld.execution import cuda
from multiworld.ops.validation import WorldFacts

GPU = torch.device("cuda", 0)
ILLEGAL_ACCESS = RuntimeError("CUDA error: an illegal memory access was encountered")


class FakeStream:
    """Runs work in its order, when somebody waits.

    Args:
        after: its work of now comes first.
    """

    def __init__(self, after: "FakeStream | None" = None) -> None:
        self._kernels: list[Callable[[], object]] = []
        self._done = 0
        self._lock = threading.RLock()
        if after is not None:
            self.wait_stream(after)

    def queue(self, kernel: Callable[[], object]) -> None:
        self._kernels.append(kernel)

    def run(self, count: int | None = None) -> None:
        """Wait for its first `count` pieces of work, by default for all that are queued now."""
        with self._lock, torch.inference_mode():  # kernels write any tensor
            for kernel in self._kernels[self._done : len(self._kernels) if count is None else count]:
                self._done += 1
                kernel()

    def wait_event(self, event: "FakeEvent") -> None:
        self.queue(event.run)

    def wait_stream(self, stream: "FakeStream") -> None:
        queued = len(stream._kernels)
        self.queue(lambda: stream.run(queued))

    def synchronize(self) -> None:
        self.run()


class FakeEvent:
    """A point in a stream. As long as `running` is not set, the GPU is busy, and who waits blocks."""

    running = threading.Event()

    def __init__(self, *, blocking: bool = False) -> None:
        self._stream = FakeStream()
        self._queued = 0

    def record(self, stream: FakeStream) -> None:
        self._stream, self._queued = stream, len(stream._kernels)

    def run(self) -> None:
        self._stream.run(self._queued)

    def synchronize(self) -> None:
        assert self.running.wait(60)
        self.run()


class PinnedTensor(Tensor):
    """A tensor in pinned memory of the host. Copying it to the GPU is queued on the current stream."""

    def is_pinned(self, device: Any = None) -> bool:
        return True

    def to(self, *arguments: Any, **options: Any) -> Any:
        there, source = on_gpu(torch.full(self.shape, 77, dtype=self.dtype)), self.as_subclass(Tensor)
        there.copy_(source)
        return there


class GpuTensor(Tensor):
    """A tensor on the GPU. Copies into it, and to pinned memory, are queued on the current stream."""

    is_cuda = True
    device = GPU

    def record_stream(self, stream: Any) -> None:
        """Its memory is not used again here."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            target, source = args[0].as_subclass(Tensor), args[1].as_subclass(Tensor)
            _current().queue(lambda: target.copy_(source))
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


_streams = threading.local()
_default = FakeStream()


def _current() -> FakeStream:
    return getattr(_streams, "current", _default)


@contextlib.contextmanager
def current(stream: FakeStream) -> Iterator[FakeStream]:
    """Make a stream the current one of this thread."""
    former, _streams.current = _current(), stream
    try:
        yield stream
    finally:
        _streams.current = former


def on_gpu(tensor: Tensor) -> GpuTensor:
    return tensor.as_subclass(GpuTensor)


def _host_copy(tensor: Tensor, *, load: bool) -> Tensor:
    assert isinstance(tensor, GpuTensor)
    host = torch.full(tensor.shape, 77, dtype=tensor.dtype)
    if load:
        _current().run()
        host.copy_(tensor.as_subclass(Tensor))
    return host


def _call_on(stream: FakeStream | None, call: Callable[[], Any]) -> Any:
    with contextlib.nullcontext() if stream is None else current(stream):
        return call()


def _await_queued(stream: FakeStream | None) -> None:
    if stream is not None:
        stream.run()


def install_streams(patch: pytest.MonkeyPatch) -> None:
    """Replace the streams and events of torch."""
    FakeEvent.running.set()
    patch.setattr(torch.cuda, "Stream", lambda device: FakeStream())
    patch.setattr(torch.cuda, "Event", FakeEvent)
    patch.setattr(torch.cuda, "stream", current)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: _current())
    patch.setattr(torch.cuda, "set_device", lambda device: None)


def install(patch: pytest.MonkeyPatch) -> None:
    """Replace CUDA in the library by this GPU."""
    patch.setattr(cuda, "host_copy", _host_copy)
    patch.setattr(cuda, "copy_stream", lambda device: FakeStream(_current()))
    patch.setattr(cuda, "current_stream", lambda device: _current())
    patch.setattr(cuda, "call_on", _call_on)
    patch.setattr(cuda, "await_queued", _await_queued)


def stage_all(patch: pytest.MonkeyPatch) -> None:
    """Copy tensors of the CPU through other memory of the host, as those of a GPU."""
    check = WorldFacts.check_devices
    patch.setattr(WorldFacts, "check_devices", lambda *arguments: check(*arguments) or True)
