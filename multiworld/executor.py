"""Runs the operations of one world: hands each to a connection or to c10d, waits without blocking the caller, completes or fails it.

A send or receive uses the connection to its peer (multiworld/transport/connection.py), on the event loop on which the world was
formed. So do collectives that have a script (multiworld/collectives) and the comparison of signatures before any collective of a
checked world. Operations of c10d (NCCL, or Gloo on request) complete through c10d's future. Work that may block (copies from and to
a device, NCCL) runs on threads of this world. One thread posts all NCCL operations in the order in which they were started. Other
threads poll for their completion, because an event on a stream of torch's pool might wait for another world that uses the same
stream.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from multiworld.collectives.scheduler import CollectiveScheduler
from multiworld.errors import Cause, WorldError
from multiworld.execution.blocking_pool import BlockingPool
from multiworld.execution.cuda import await_queued, on_stream
from multiworld.execution.failures import ConnectionLostError, described, lost_connections
from multiworld.execution.process_group import FOREVER, NCCL_ABORT_S, NCCL_POLL_S
from multiworld.execution.serial_queue import SerialQueue
from multiworld.ops.operation import Operation, Part, Plan
from multiworld.transport.connection import HEAD, MESSAGE, PeerConnection, Transfer, message_head, sealed
from multiworld.transport.poller import Poller, poller_of

_Posted = TypeVar("_Posted")


class ExecutorWorld(Protocol):
    """The world, as its executor uses it. All methods may be called from any thread."""

    name: str
    rank: int
    size: int

    def ending(self) -> WorldError | None:
        """A new instance of the error that the world ended with; None while the world is usable."""

    def break_(self, cause: Cause, rank: int, detail: str = "") -> None:
        """Break the world. `rank` is the member that caused it, -1 if unknown."""
        ...

    def on_connection_failed(self, peer: int, detail: str) -> None:
        """A connection to `peer` was lost, of this library or of c10d."""

    def on_line_nonsense(self, peer: int, detail: str) -> None:
        """`peer` violated the protocol, or its fingerprint does not match."""

    def on_local_failure(self, detail: str) -> None:
        """This member failed, for example because it lacks memory or a thread. No peer failed."""

    def on_drained(self) -> None:
        """`draining` is set and the last pending operation has completed or failed."""


class OperationExecutor:
    """Starts, completes and fails the operations of one world.

    Args:
        lock: the lock of the world. No operation is posted after the world has ended.
        checked: whether to compare fingerprints before every collective; not in a world with NCCL only.
    """

    def __init__(self, world: ExecutorWorld, lock: threading.RLock, *, checked: bool) -> None:
        self.draining = False
        """A member left: pending operations may still complete. Operations that fail get their error when the world is torn down."""
        self._world = world
        self._lock = lock
        self._group: ProcessGroup | None = None
        self._pending: set[Operation] = set()
        self._delivering: set[Operation] = set()
        self._casualties: list[Operation] = []
        self._waiters = BlockingPool(f"multiworld-{world.name}", lambda error: world.on_local_failure(described(error)))
        self._collectives = SerialQueue(self._waiters)
        self._concert = CollectiveScheduler(self, lock, self._waiters, checked=checked)
        self._nccl = SerialQueue(self._waiters)  # a communicator takes its operations one at a time
        self._lines: dict[int, PeerConnection] = {}
        self._board: Poller | None = None

    @property
    def busy(self) -> bool:
        """Whether an operation is pending."""
        return bool(self._pending)

    def open(self, group: ProcessGroup, socks: dict[int, socket.socket], board: Poller) -> None:
        """Allow operations to start. Takes ownership of `socks`, the connected sockets by rank.

        Raises OSError when the kernel cannot poll them; all of them are closed then.
        """
        try:
            for peer, sock in socks.items():
                self._lines[peer] = PeerConnection(peer, sock, self._lock, self, board)
        except OSError:
            for line in self._lines.values():
                line.close()
            for sock in socks.values():
                sock.close()
            raise
        self._group = group
        self._board = board

    # -- starting ------------------------------------------------------------------------------------------------------------

    def start(self, plan: Plan, timeout_s: float | None) -> Operation:
        """Start an operation on the running event loop. Does not block.

        Errors while starting fail the returned operation and break the world. `timeout_s` breaks the world when the operation is still
        pending after so many seconds; None means no limit.
        Raises WorldError when the world has ended or is still joining.
        """
        loop = asyncio.get_running_loop()
        operation = Operation(plan, timeout_s, loop.create_future(), self)
        with self._lock:  # the world and its threads must not end before the operation is registered
            if ending := self._world.ending():
                raise ending
            if self._group is None:
                raise WorldError(self._world.name, "still joining: await its initialisation before using it")
            self._come_along(loop)
            self._pending.add(operation)
            try:
                self._set_off(operation)
            except Exception as refusal:  # noqa: BLE001 - the operation may have started: the world breaks
                self.fail([operation], operation.peer, refusal.with_traceback(None))
            except BaseException:
                self._pending.discard(operation)
                raise
        operation.posted = True
        if timeout_s is not None and not operation.done():
            operation.timer = loop.call_later(timeout_s, self._expire, operation)
        return operation

    def _come_along(self, loop: asyncio.AbstractEventLoop) -> None:
        """Move the connections to the poller of `loop` if the event loop that served them has ended."""
        board = self._board
        if board is None or board.serves(loop) or board.running:
            return
        self._board = poller_of(loop)
        for line in self._lines.values():
            line.move(self._board)

    def _set_off(self, operation: Operation) -> None:
        """Hand the operation to its connection, to the collective scheduler, or to `post`."""
        plan = operation.plan
        if plan.tensors and plan.tensors[0].is_cuda:
            operation.stream = torch.cuda.current_stream(plan.tensors[0].device)
        if plan.peer >= 0 and not _on_nccl(plan):
            if plan.name == "send":
                self._write(operation)
            else:
                self._expect(operation)
            return
        if plan.peer < 0 and self._concert.concerns(operation, self._lines):
            self._concert.start(operation, self._lines)
        else:
            self.post(operation)

    def post(self, operation: Operation) -> None:
        """Hand a collective, or an operation for NCCL, to c10d: directly, or through a serial queue if that may block or break the order.

        Call it under the world's lock. Raises RuntimeError when c10d refuses, a connection is lost, or no thread can start.
        """
        plan = operation.plan
        lane = self._nccl if _on_nccl(plan) else self._collectives
        # Copies from a device may block, and so may NCCL, which connects lazily.
        if plan.staged or _on_nccl(plan) or lane.unposted:
            lane.unposted += 1
            lane.run(partial(self._carry, operation, lane))
        elif self._group is not None:
            assert plan.post is not None
            with lost_connections():
                operation.works = [plan.post(self._group)]
            operation.works[0].get_future().add_done_callback(partial(self._on_future, operation))

    def _write(self, operation: Operation) -> None:
        """Queue a send on its connection. It is queued before its data is copied from a device, to keep the order of messages."""
        plan = operation.plan
        assert plan.buffer is not None
        if plan.header is None:
            head = message_head(plan.signature, plan.tag, plan.size_bytes)
        else:
            head = HEAD.pack(MESSAGE, plan.tag, plan.size_bytes, plan.header)
        letter = Transfer(operation, head)
        if not plan.staged:
            letter.put(plan.buffer())
        self._lines[plan.peer].send(letter, plan.tag)
        if plan.staged:
            self._waiters.run(partial(self._fetch, letter))

    def _expect(self, operation: Operation) -> None:
        """Post a receive on its connection."""
        plan = operation.plan
        letter = Transfer(operation, sealed(plan.signature), accept=plan.accept)
        if plan.buffer is not None:
            letter.put(plan.buffer())
        self._lines[plan.peer].receive(letter, plan.tag)

    # -- pending messages --------------------------------------------------------------------------------------------------------

    def _fetch(self, letter: Transfer) -> None:
        """Copy the data of a send from its device, then send it. Runs on a thread of the blocking pool."""
        operation = letter.freight
        assert isinstance(operation, Operation)
        assert operation.plan.buffer is not None
        try:
            with on_stream(operation.stream):
                data = operation.plan.buffer()
            with self._lock:
                letter.put(data)
                self._lines[operation.peer].advance(operation.plan.tag)
        except Exception as error:  # noqa: BLE001 - see `fail`
            self.fail([operation], operation.peer, error.with_traceback(None))

    def on_carried(self, freight: Operation | Part) -> None:
        """A connection completed a transfer."""
        if isinstance(freight, Part):
            freight.on_carried()
        else:
            self.on_done(freight)

    def on_done(self, operation: Operation) -> None:
        """The data was transferred: deliver the results, if necessary, and complete the operation."""
        if operation.plan.deliver is None:
            self._settle(operation)
            return
        try:
            self._waiters.run(partial(self._deliver, operation))
        except Exception as error:  # noqa: BLE001 - see `fail`
            self.fail([operation], operation.peer, error.with_traceback(None))

    def _deliver(self, operation: Operation) -> None:
        """Copy the results to the caller's tensors and complete the operation. Runs on a thread of the blocking pool."""
        try:
            with on_stream(operation.stream):
                self._bring(operation)
                await_queued(operation.stream)
        except Exception as error:  # noqa: BLE001 - see `fail`
            self.fail([operation], operation.peer, error.with_traceback(None))
        else:
            self._settle(operation)

    def _bring(self, operation: Operation) -> None:
        """Copy the results to the caller's tensors. Raises RuntimeError if the operation has already failed; nothing is written then."""
        if operation.plan.deliver is None:
            return
        with self._lock:
            if operation not in self._pending:
                raise RuntimeError("the world has ended")
            self._delivering.add(operation)
        operation.plan.deliver()

    def on_line_lost(self, peer: int, freights: list[Operation | Part], reason: str) -> None:
        operations = list(dict.fromkeys(each.whole if isinstance(each, Part) else each for each in freights))
        if operations:  # without pending transfers, a later operation reports the loss; the control connection may know the reason by then
            self.fail(operations, peer, ConnectionLostError(reason))

    def on_line_nonsense(self, peer: int, detail: str) -> None:
        self._world.on_line_nonsense(peer, detail)

    def on_line_error(self, peer: int, error: Exception) -> None:
        self._world.on_local_failure(f"reading from rank {peer}: {described(error)}")

    def read(self) -> None:
        """Read and handle received data of all connections now, because the event loop may be blocked."""
        with self._lock:
            for line in self._lines.values():
                line.read()

    # -- collectives over connections (see `CollectiveHost`) ----------------------------------------------------------------------

    def check(self) -> None:
        """Raises WorldError when the world has ended. While `draining` is set, pending operations may continue."""
        ending = self._world.ending()
        if ending is not None and (self._group is None or not self.draining):
            raise ending

    def on_abandoned(self, operation: Operation) -> None:
        self._world.break_(Cause.ABORTED, self._world.rank, f"{operation.name} cancelled")

    def on_dissent(self, rank: int, detail: str) -> None:
        self._world.on_line_nonsense(rank, detail)

    # -- pending operations of c10d (on threads of the blocking pool) --------------------------------------------------------------

    def _carry(self, operation: Operation, lane: SerialQueue) -> None:
        """Post a queued operation and complete it.

        NCCL operations are completed on another thread, because their completion may depend on operations that are queued behind them.
        """
        if not self._attempt(operation, partial(self._post_late, operation, lane)):
            return
        if not _on_nccl(operation.plan):
            self._complete(operation)
            return
        try:
            self._waiters.run(partial(self._complete, operation))
        except RuntimeError as refusal:
            self.fail([operation], operation.peer, refusal.with_traceback(None))

    def _complete(self, operation: Operation) -> None:
        """Wait for a posted operation, deliver its results and complete it."""

        def finish() -> None:
            self._wait_for(operation)
            self._bring(operation)
            await_queued(operation.stream)

        if self._attempt(operation, finish):
            self._settle(operation)

    def _attempt(self, operation: Operation, step: Callable[[], None]) -> bool:
        """Run a step of the operation on its stream. On an error, fail the operation and return False."""
        try:
            with on_stream(operation.stream):
                step()
        except Exception as error:  # noqa: BLE001 - see `fail`
            self.fail([operation], operation.peer, error.with_traceback(None))  # a traceback keeps tensors alive
        else:
            return True
        return False

    def _post_late(self, operation: Operation, lane: SerialQueue) -> None:
        """Hand a queued operation to c10d."""
        plan = operation.plan
        assert plan.post is not None
        try:
            operation.works = [self._post_unless_ended(plan.post, _on_nccl(plan))]
        finally:
            with self._lock:
                lane.unposted -= 1

    @lost_connections()
    def _post_unless_ended(self, post: Callable[[ProcessGroup], _Posted], slow: bool = False) -> _Posted:
        """Call `post`, under the world's lock unless `slow`. Raises WorldError when the world has ended (see `check`)."""
        with self._lock:
            self.check()
            group = self._group
            assert group is not None
            if not slow:
                return post(group)
        return post(group)

    @lost_connections()
    def _wait_for(self, operation: Operation) -> None:
        """Block until c10d completes the operation. Raises RuntimeError when it failed; with NCCL, WorldError when the world ended."""
        if not _on_nccl(operation.plan):
            for work in operation.works:
                work.wait(FOREVER)
            return
        for work in operation.works:
            self._wait_for_nccl(work)
        self.check()  # operations that NCCL aborts look complete

    def _wait_for_nccl(self, work: Work) -> None:
        """Poll until `work` completes. Raises RuntimeError when it failed, or still runs `NCCL_ABORT_S` seconds after the world ended."""
        until_s: float | None = None
        while not work.is_completed():
            if until_s is None and self._world.ending() is not None:
                until_s = time.monotonic() + NCCL_ABORT_S
            if until_s is not None and time.monotonic() > until_s:
                raise RuntimeError("NCCL goes on after its abort")
            time.sleep(NCCL_POLL_S)
        work.wait()  # raises its error; orders the current stream after the completed work

    def _on_future(self, operation: Operation, future: "torch.futures.Future[Any]") -> None:
        """A collective of Gloo completed or failed. Called on a thread of Gloo, or immediately if it was already complete."""
        try:
            with lost_connections():
                future.value()
            self._bring(operation)
        except Exception as error:  # noqa: BLE001 - see `fail`
            self.fail([operation], operation.peer, error.with_traceback(None))
        else:
            self._settle(operation)

    # -- the outcome (from any thread) -------------------------------------------------------------------------------------------

    def _settle(self, operation: Operation) -> None:
        # Does not take the lock, because another thread may hold it while posting. The order matters: code that sets `draining` then
        # reads `busy`, so `_pending` must change before `draining` is read here.
        self._pending.discard(operation)
        self._delivering.discard(operation)
        operation.works = []
        operation.resolve(None)
        if self.draining and not self._pending:
            self._world.on_drained()

    def fail(self, operations: Sequence[Operation], peer: int, error: Exception) -> None:
        """Fail the operations and break the world. Their callers get the error of the world, when it is known.

        A ConnectionLostError is attributed to `peer`. Any other error (no memory, no thread, refused by the backend) is a failure of this
        member.
        """
        with self._lock:
            self._pending.difference_update(operations)
            self._delivering.difference_update(operations)
            ending = self._world.ending()
            if ending is None or self.draining:
                self._casualties += operations
            drained = self.draining and not self._pending
        for operation in operations:
            operation.works = []
        if drained:
            self._world.on_drained()
        if ending is None:
            detail = f"{operations[0].name}: {described(error)}"
            if isinstance(error, ConnectionLostError):
                self._world.on_connection_failed(peer, detail)
            else:
                self._world.on_local_failure(detail)
        elif not self.draining:
            for operation in operations:
                operation.resolve(self._world.ending())

    def _expire(self, operation: Operation) -> None:
        if operation in self._pending:
            detail = f"{operation.name} took over {operation.timeout_s:g} s"
            self._world.break_(Cause.TIMEOUT, operation.peer, detail)

    def on_cancelled(self, operation: Operation) -> WorldError | None:
        self._world.break_(Cause.ABORTED, self._world.rank, f"{operation.name} cancelled")
        return self._world.ending()

    # -- teardown (on the thread that reclaims the world) --------------------------------------------------------------------------

    def end(self) -> ProcessGroup | None:
        """Close the connections and fail the pending operations, except those whose results are being copied to the caller's tensors.

        Returns the process group, which the caller must abort. No operation is posted to it any more, but it may write to tensors until
        it is destroyed.
        """
        with self._lock:
            self.draining = False
            group, self._group = self._group, None
            for line in self._lines.values():
                line.close()
            ended = [*self._casualties, *(self._pending - self._delivering)]
            self._casualties = []
            self._pending &= self._delivering
        for operation in ended:
            operation.works = []
            operation.resolve(self._world.ending())
        return group

    def join(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the threads, then fail all operations that remain. Call it after the group is aborted.

        Returns False when a thread is still running, for example blocked in c10d.
        """
        back = self._waiters.close(timeout_s)
        self.answer_all()
        return back

    def answer_all(self) -> None:
        """Fail all operations that are still pending, whether or not the ended world is completely freed. Idempotent."""
        with self._lock:
            self.draining = False
            for line in self._lines.values():
                line.close()
            left, self._pending = [*self._pending, *self._casualties], set()
            self._casualties, self._delivering = [], set()
        for operation in left:
            operation.resolve(self._world.ending())


def _on_nccl(plan: Plan) -> bool:
    """Whether NCCL carries the operation: its tensors are CUDA tensors that are not copied through host memory."""
    return bool(plan.tensors) and plan.tensors[0].is_cuda and not plan.staged
