"""The collectives of one world that NCCL carries. No run with several GPUs is on record (docs/gpu.md).

One thread builds the group and posts the collectives, in the order in which the members start them, because NCCL may block. Another polls
for their completion. Tensors are kept until NCCL has completed the operation, also when the caller has its error already, because a kernel
may still write to them.
"""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from torch._C._distributed_c10d import ProcessGroup, Work

from multiworld.execution.cuda import call_on
from multiworld.execution.failures import lost_connections
from multiworld.execution.process_group import NCCL_ABORT_S, NCCL_POLL_S, abort_nccl_group
from multiworld.execution.store import ControlStore
from multiworld.execution.worker_thread import WorkerThread
from multiworld.ops.operation import Collective

_unfinished: list[tuple[Collective, Work]] = []
"""Operations that NCCL has not completed although they were aborted. Their tensors are never freed."""


class NcclCollectives:
    """Builds the NCCL group of a world and hands collectives to it.

    Attributes:
        store: the rendezvous of the members.

    Args:
        make_group: builds the group. Blocks until all members build theirs.
        check: raises the error of the world when it has ended.
        on_done: called when NCCL has completed an operation.
        on_failed: called with an operation and its error.
    """

    def __init__(
        self,
        name: str,
        store: ControlStore,
        make_group: Callable[[], ProcessGroup],
        check: Callable[[], None],
        on_done: Callable[[Collective], None],
        on_failed: Callable[[Collective, Exception], None],
    ) -> None:
        self.store = store
        self._make_group = make_group
        self._group: ProcessGroup | None = None
        self._check = check
        self._on_done = on_done
        self._on_failed = on_failed
        self._threads = WorkerThread(f"multiworld-{name}-nccl"), WorkerThread(f"multiworld-{name}-nccl-poll")
        self._posted: dict[Collective, Work] = {}
        self._aborted = False

    def connect(self) -> Future[None]:
        """Build the group. Does not block. Raises RuntimeError when no thread can start. The future has the error of `make_group`."""
        connected = Future[None]()
        connected.set_running_or_notify_cancel()  # it cannot be cancelled
        self._threads[0].run(partial(self._connect, connected))
        return connected

    def post(self, operation: Collective) -> None:
        """Hand an operation to NCCL. Does not block. Raises RuntimeError after `abort`, or when no thread can start."""
        self._threads[0].run(partial(self._post, operation))

    def abort(self, error: Exception, timeout_s: float) -> bool:
        """Abort everything. Waits at most `NCCL_ABORT_S`, then `timeout_s` seconds for the threads. Returns whether they have ended.

        Args:
            error: why; for members that wait for the rendezvous.
        """
        self._aborted = True
        self.store.abort(error)
        if self._group is not None:
            abort_nccl_group(self._group)
        until_s = time.monotonic() + timeout_s
        ended = [thread.close(max(0.0, until_s - time.monotonic())) for thread in self._threads]
        return all(ended)

    def _connect(self, connected: Future[None]) -> None:
        try:
            with lost_connections():
                self._group = self._make_group()
            connected.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised to the caller of `connect`
            connected.set_exception(error.with_traceback(None))

    def _post(self, operation: Collective) -> None:
        assert operation.post is not None
        assert self._group is not None
        try:
            self._check()
            with lost_connections():
                self._posted[operation] = call_on(operation.stream, partial(operation.post, self._group))
            self._threads[1].run(self._poll)
        except Exception as error:  # noqa: BLE001 - the operation and its world fail
            self._on_failed(operation, error)

    def _poll(self) -> None:
        """Wait until NCCL has completed all operations. Those that still run `NCCL_ABORT_S` after the abort fail."""
        until_s = math.inf
        while self._posted:
            for operation, work in list(self._posted.items()):
                if work.is_completed() or time.monotonic() > until_s:
                    self._finish(operation, work)
            if self._aborted:
                until_s = min(until_s, time.monotonic() + NCCL_ABORT_S)
            time.sleep(NCCL_POLL_S)

    def _finish(self, operation: Collective, work: Work) -> None:
        try:
            if not work.is_completed():
                _unfinished.append((operation, work))
                raise RuntimeError("NCCL still runs the operation after its abort")
            with lost_connections():
                call_on(operation.stream, work.wait)  # raises its error, or orders the current stream after it
            self._check()  # operations that NCCL aborts look complete
        except Exception as error:  # noqa: BLE001 - the operation and its world fail
            self._on_failed(operation, error)
        else:
            self._on_done(operation)
        del self._posted[operation]
