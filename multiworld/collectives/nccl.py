"""The NCCL group of a world, of stock PyTorch without the global default group, and the collectives that it carries.

One thread builds the group and posts the collectives, in the order in which the members start them, because NCCL may block. Another polls
for their completion. Tensors are kept until NCCL has completed the operation, also when the caller has its error already, because a kernel
may still write to them.

The required facts about c10d are in docs/decisions/0001-one-process-group-a-link.md. No run with several GPUs is on record (docs/gpu.md).
"""

import _thread
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import DebugLevel, ErrorType, ProcessGroup, Store, Work, get_debug_level

from multiworld.execution.cuda import call_on
from multiworld.execution.failures import ConnectionLostError, described
from multiworld.execution.store import ControlStore
from multiworld.execution.threads import WorkerThread
from multiworld.ops.operation import Collective

logger = logging.getLogger(__name__)

FOREVER = timedelta(days=3650)
"""Timeout of NCCL's operations. Failures are detected by heartbeats, not by this timeout."""
NCCL = "nccl"
"""Backend: collectives on CUDA tensors use NCCL of c10d."""
_OWN = ("multiworld", "gloo", "tcp")
"""Backend: the library's own connections. Programs for c10d and pymultiworld pass "gloo"."""

NCCL_ABORT_S = 5.0
"""Seconds until an abort of NCCL counts as hung."""
NCCL_POLL_S = 0.0005
"""Seconds between polls for the completion of NCCL operations."""
_NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # CleanUpOnly: torch's watchdog aborts the world. 1, of torchrun, and 3 end the process
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # else an error of CUDA in the watchdog ends the process
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # else the watchdog sleeps a minute before it aborts
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else one failed world makes a thread collect debugging data of the process
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # else there is no watchdog
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # else each collective writes keys into the rendezvous
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else a monitor thread ends a process in which NCCL hangs
}
"""Environment variables that must have these values when NCCL is used first. Read in the source of torch 2.14, not run on a GPU."""
_NCCL_DEFAULTS = {
    "TORCH_DIST_USE_NCCL2": "0",  # in torch 2.15 the class registered for NCCL has other options
    # Without it, a thread waits 30 minutes for a member that froze while NCCL connects, and an abort waits for this thread.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "20",
}
"""Environment variables that are set unless they are set already."""
_BLOCKING = 0
"""NCCL connects in the background. 1 is torch's default since NCCL 2.26 hung with 0 (pytorch#153960), but cannot be aborted meanwhile."""
_CUDA = torch.device("cuda")


def uses_nccl(backend: str) -> bool:
    """Return whether a backend, or a list as in c10d such as `"cpu:gloo,cuda:nccl"`, has NCCL for CUDA tensors.

    "gloo" and "tcp" are other names of "multiworld". Raises ValueError for a backend that is unknown or not available here.
    """
    parts = [part.strip() for part in backend.lower().split(",")]
    if len(parts) == 1 and ":" not in parts[0]:
        parts = [f"cuda:{parts[0]}"]
    for part in parts:
        device, _, name = part.partition(":")
        if name not in (*_OWN, NCCL) or device not in ("cpu", "cuda") or (device, name) == ("cpu", NCCL):
            raise ValueError(
                f"unknown backend {backend!r}: expected 'multiworld', 'nccl', or a list such as 'cpu:multiworld,cuda:nccl'; "
                "'gloo' means 'multiworld'"
            )
    if f"cuda:{NCCL}" not in parts:
        return False
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        raise ValueError("backend 'nccl' needs a CUDA device and a torch build with NCCL; use 'multiworld' here")
    if get_debug_level() == DebugLevel.DETAIL:
        raise ValueError(
            "backend 'nccl' does not work with TORCH_DISTRIBUTED_DEBUG=DETAIL: torch then writes each collective into the rendezvous, "
            "and may end the process after an error; set it to OFF or INFO"
        )
    return True


def check_nccl_device(device: torch.device) -> torch.device:
    """Return the CUDA device for NCCL, with an index: the current device unless `device` has an index.

    Raises ValueError when the device does not exist.
    """
    index = device.index if device.type == "cuda" else None
    count = torch.cuda.device_count()
    if index is not None and index >= count:
        raise ValueError(f"device {device} does not exist: expected an index below {count}, the number of CUDA devices")
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def make_nccl_group(store: Store, rank: int, size: int) -> ProcessGroup:
    """Build the NCCL group of one world. It is not connected yet."""
    os.environ.update(_NCCL_ENVIRONMENT)
    for name, value in _NCCL_DEFAULTS.items():
        os.environ.setdefault(name, value)
    from torch.distributed import ProcessGroupNCCL  # noqa: PLC0415 - absent from builds without CUDA

    group = ProcessGroup(store, rank, size)
    options = ProcessGroupNCCL.Options()
    options._timeout = FOREVER  # NCCL uses the timeout of the group, not that of the operation
    options.config.blocking = _BLOCKING
    nccl = ProcessGroupNCCL(store, rank, size, options)
    group._register_backend(_CUDA, ProcessGroup.BackendType.NCCL, nccl)
    return group


def connect_nccl_group(device: torch.device, check: Callable[[], None], group: ProcessGroup) -> None:
    """Connect all ranks of a group. Blocks until they do it, so call it on a thread. Not run with several GPUs.

    Args:
        device: the CUDA device, with an index.
        check: raises the error that the world ended with, if it ended. Polled because NCCL does not detect the end.
    Raises:
        RuntimeError: a peer did not connect, or the store or the group was aborted. The group is aborted then.
    """
    try:
        check()  # from here, the end of the world aborts the group
        group._get_backend(_CUDA).eager_connect_single_device(device)
        check()
        with torch.cuda.device(device):  # complete lazy connection setup here, not on an event loop
            probe = torch.zeros(1, device=device)
            connecting = _Running(group.allreduce([probe]), torch.cuda.current_stream(device))
        while not connecting.is_done():
            check()
            raise_nccl_error(group)
            time.sleep(NCCL_POLL_S)
        raise_nccl_error(group)
    except BaseException:
        abort_nccl_group(group)  # else its kernel keeps waiting on the GPU for a failed member
        raise


def abort_nccl_group(group: ProcessGroup, timeout_s: float = NCCL_ABORT_S) -> None:
    """Make all pending operations of `group` fail. Waits at most `timeout_s` seconds; with 0 it does not block.

    The abort runs on a thread, because it can hang; that thread is left running then. Without a thread the group is never freed, because
    its destructor may block.
    """
    aborted = threading.Event()

    def abort() -> None:
        try:
            nccl = group._get_backend(_CUDA)
            nccl._set_default_timeout(
                timedelta(seconds=NCCL_ABORT_S)
            )  # of the abort: operations had theirs when they started
            nccl.abort()
        except Exception as error:  # noqa: BLE001 - nobody awaits this thread's error
            logger.error("NCCL could not abort: %s", described(error))  # noqa: TRY400 - the traceback adds nothing
        aborted.set()

    try:
        _thread.start_new_thread(abort, ())
    except RuntimeError as error:  # too many threads, or the interpreter shuts down
        _not_aborted.append(group)
        logger.error("NCCL is not aborted: %s", error)  # noqa: TRY400 - the traceback adds nothing
        return
    if not aborted.wait(timeout_s) and timeout_s:
        logger.error("NCCL did not abort within %.0f s; its thread keeps running", timeout_s)


_not_aborted: list[ProcessGroup] = []
_unfinished: list[tuple[Collective, "_Running"]] = []
"""Operations that NCCL has not completed although they were aborted, or that may still run. Their tensors are never freed."""


def raise_nccl_error(group: ProcessGroup) -> None:
    """Raise ConnectionLostError if torch's watchdog has found an error of NCCL. Operations that it has aborted look complete."""
    error = group._get_backend(_CUDA).get_error()
    if error != ErrorType.SUCCESS:
        raise ConnectionLostError(f"NCCL reports {error.name}")


class _Running:
    """An operation that NCCL runs.

    Its end is that of an event on a stream of its own. `Work.is_completed` would wait for the lock of the communicator with Python's global
    lock held, and an abort that hangs, ours or that of torch's watchdog, keeps the former.

    Args:
        stream: of the caller; None for a tensor that is on no GPU.
    """

    def __init__(self, work: Work, stream: Any) -> None:
        self.work = work
        self._stream = stream
        self._ended: Any = None

    def is_done(self) -> bool:
        """Does not block. Raises an error of CUDA."""
        if self._stream is None:
            return self.work.is_completed()
        if self._ended is None:
            # Streams of high priority are shared less than others: they come from a pool of 32.
            waiting = torch.cuda.Stream(self._stream.device, priority=-1)  # type: ignore[no-untyped-call]
            call_on(waiting, self.work.wait)  # blocks only this stream
            self._ended = waiting.record_event()
        return bool(self._ended.query())


def _has_completed(running: _Running) -> bool:
    """Return whether the operation has completed. False if CUDA cannot tell."""
    try:
        return running.is_done()
    except Exception:  # noqa: BLE001
        return False


@contextlib.contextmanager
def _lost_connections() -> Iterator[None]:
    """Translate a RuntimeError of c10d into ConnectionLostError, unless it reports missing memory."""
    try:
        yield
    except RuntimeError as error:
        missing_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if missing_memory or isinstance(error, ConnectionLostError):
            raise
        raise ConnectionLostError(str(error)) from None


class NcclCollectives:
    """Builds the NCCL group of a world and hands collectives to it.

    Attributes:
        store: the rendezvous of the members.

    Args:
        make_group: builds the group.
        connect_group: connects it. Blocks until all members connect theirs.
        check: raises the error of the world when it has ended.
        on_done: called when NCCL has completed an operation.
        on_failed: called with the operations that failed and their error.
    """

    def __init__(
        self,
        name: str,
        store: ControlStore,
        make_group: Callable[[], ProcessGroup],
        connect_group: Callable[[ProcessGroup], None],
        check: Callable[[], None],
        on_done: Callable[[Collective], None],
        on_failed: Callable[[Sequence[Collective], Exception], None],
    ) -> None:
        self.store = store
        self._make_group = make_group
        self._connect_group = connect_group
        self._group: ProcessGroup | None = None
        self._check = check
        self._on_done = on_done
        self._on_failed = on_failed
        self._threads = WorkerThread(f"multiworld-{name}-nccl"), WorkerThread(f"multiworld-{name}-nccl-poll")
        self._posted: dict[Collective, _Running] = {}
        self._give_up_s = math.inf

    def connect(self) -> Future[None]:
        """Build and connect the group. Does not block. Raises RuntimeError when no thread can start. The future has an error of these."""
        connected = Future[None]()
        connected.set_running_or_notify_cancel()  # it cannot be cancelled
        self._threads[0].run(partial(self._connect, connected))
        return connected

    def post(self, operation: Collective) -> None:
        """Hand an operation to NCCL. Does not block. Raises RuntimeError after `abort`, or when no thread can start."""
        self._threads[0].run(partial(self._post, operation))

    def abort(self, error: Exception, timeout_s: float) -> bool:
        """Abort everything. Waits at most `timeout_s` seconds for the abort, then as long for the operations and the threads to end.

        With 0 it does not block. The owner fails the operations itself.

        Args:
            error: why; for members that wait for the rendezvous.
        Returns whether everything has ended. If not, the tensors of unfinished operations are never freed.
        """
        self.store.abort(error)
        if self._group is not None:
            abort_nccl_group(self._group, timeout_s)
        self._give_up_s = time.monotonic() + timeout_s
        ended = [thread.close(max(0.0, self._give_up_s - time.monotonic())) for thread in self._threads]
        unfinished = [each for each in list(self._posted.items()) if not _has_completed(each[1])]
        _unfinished.extend(unfinished)
        return all(ended) and not unfinished

    def _connect(self, connected: Future[None]) -> None:
        try:
            with _lost_connections():
                self._group = self._make_group()  # `abort` may use it from here
                self._connect_group(self._group)
            connected.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised to the caller of `connect`
            connected.set_exception(error.with_traceback(None))

    def _post(self, operation: Collective) -> None:
        assert operation.post is not None
        assert self._group is not None
        try:
            self._check()
            with _lost_connections():
                work = call_on(operation.stream, partial(operation.post, self._group))
                self._posted[operation] = _Running(work, operation.stream)
            self._threads[1].run(self._poll)
        except Exception as error:  # noqa: BLE001 - the operation and its world fail
            self._on_failed([operation], error)

    def _poll(self) -> None:
        """Wait until NCCL has completed all operations, at most until `abort` gives up."""
        while self._posted and time.monotonic() < self._give_up_s:
            for operation, running in list(self._posted.items()):
                try:
                    if not running.is_done():
                        continue
                except Exception as error:  # noqa: BLE001 - of CUDA: the operation and its world fail
                    _unfinished.append((operation, running))
                    del self._posted[operation]
                    self._on_failed([operation], error)
                else:
                    self._finish(operation, running)
            time.sleep(NCCL_POLL_S)

    def _finish(self, operation: Collective, running: _Running) -> None:
        assert self._group is not None
        try:
            with _lost_connections():
                call_on(operation.stream, running.work.wait)  # raises its error, or orders the current stream after it
            self._check()  # operations that NCCL aborts look complete
            if operation.stream is not None:
                raise_nccl_error(self._group)
            self._on_done(operation)
        except Exception as error:  # noqa: BLE001 - the operation and its world fail
            self._on_failed([operation], error)
        del self._posted[operation]
