"""The operations of one world: starts each, hands it to a connection or to NCCL, and completes or fails it.

    start ──▶ pending ──▶ copying back ──▶ done
                 └──────────────┴────────▶ failed    with the error of the world, when that is known

A send or receive uses the connection to its peer (multiworld/transport/connection.py), on the event loop on which the world was
formed. So do collectives (multiworld/collectives). Work that may block (copies from and to a device, NCCL) runs on threads of this
world. One thread posts all NCCL operations in the order in which they were started, and another polls for their completion.

The lock of this module guards the connections and the operations. It is held while tensors are copied and while callbacks of the
caller run, so the control loop, which serves all worlds of the process, must never wait for it.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import Protocol

import torch
from torch._C._distributed_c10d import ProcessGroup

from multiworld.collectives.channel import NUMBERED_FROM, CollectiveChannel
from multiworld.collectives.fingerprint import MismatchError, verify
from multiworld.errors import Cause, WorldError
from multiworld.execution.cuda import await_queued, call_on
from multiworld.execution.failures import ConnectionLostError, described, lost_connections
from multiworld.execution.process_group import NCCL_ABORT_S, NCCL_POLL_S
from multiworld.execution.worker_thread import WorkerThread
from multiworld.ops.operation import Collective, Operation, Plan, Receive, Send
from multiworld.transport.connection import PeerConnection
from multiworld.transport.poller import Poller, poller_of
from multiworld.transport.segments import SegmentPool
from multiworld.transport.shared import SharedMemoryConnection
from multiworld.transport.transfer import Transfer
from multiworld.transport.wire import HEAD, MESSAGE, encode_signature, message_head

_READ_S = 0.02
"""Interval at which connections are read while operations are drained."""


class Transport(StrEnum):
    """How two members of a world exchange data."""

    SHARED_MEMORY = "shared memory"
    TCP = "tcp"


class OperationWorld(Protocol):
    """The world, as its operations use it. All methods may be called from any thread."""

    name: str
    rank: int

    def ending(self) -> WorldError | None:
        """A new instance of the error that the world ended with; None while the world is usable."""

    def fail(self, cause: Cause, rank: int, detail: str = "") -> None:
        """Break the world now. `rank` is the member that caused it, -1 if unknown."""
        ...

    def report(self, cause: Cause, rank: int, detail: str) -> None:
        """Break the world soon, not on this thread. After a lost connection (TRANSPORT) the control connection may know a better cause."""


class WorldOperations:
    """Starts, completes and fails the operations of one world.

    Attributes:
        draining: a member left. Pending operations may still complete; those that fail get their error when the world is torn down.
        transports: how this member is connected to each of the others, by rank.

    Args:
        verify_collectives: whether to compare fingerprints before every collective; not in a world with NCCL only.
    """

    def __init__(self, world: OperationWorld, *, verify_collectives: bool) -> None:
        self.draining = False
        self.transports: dict[int, Transport] = {}
        self._world = world
        self._lock = threading.RLock()
        self._opened = False
        self._group: ProcessGroup | None = None
        self._connections: dict[int, PeerConnection] = {}
        self._poller: Poller | None = None
        self._pending: set[Operation] = set()
        self._copying_back: set[Operation] = set()
        self._failed: list[Operation] = []  # they get the error of the world when it has ended
        self._copying = WorkerThread(f"multiworld-{world.name}", self._on_job_failed)
        self._posting = WorkerThread(f"multiworld-{world.name}-nccl", self._on_job_failed)
        self._polling = WorkerThread(f"multiworld-{world.name}-nccl-poll", self._on_job_failed)
        self._on_nccl: list[Operation] = []  # posted, not completed
        self._verify = verify_collectives
        self._collectives = 0  # collectives that got their number here
        self._nccl_order = asyncio.Lock()

    def _on_job_failed(self, error: BaseException) -> None:
        self._world.report(Cause.LOCAL, self._world.rank, described(error))

    def open(
        self,
        group: ProcessGroup | None,
        socks: dict[int, socket.socket],
        poller: Poller,
        segments: SegmentPool,
    ) -> None:
        """Allow operations to start. Takes ownership of `socks`, the connected sockets by rank.

        Args:
            group: the group of a world with NCCL.
        Raises OSError when the kernel cannot poll the sockets; all of them are closed then.
        """
        with self._lock:
            try:
                for peer, sock in socks.items():
                    if sock.family == socket.AF_UNIX:
                        self._connections[peer] = SharedMemoryConnection(peer, sock, self._lock, self, poller, segments)
                        self.transports[peer] = Transport.SHARED_MEMORY
                    else:
                        self._connections[peer] = PeerConnection(peer, sock, self._lock, self, poller)
                        self.transports[peer] = Transport.TCP
            except OSError:
                self._close_connections()
                for sock in socks.values():
                    sock.close()
                raise
            self._group = group
            self._poller = poller
            self._opened = True

    # -- starting ------------------------------------------------------------------------------------------------------------

    def start(self, plan: Plan, timeout_s: float | None) -> Operation:
        """Start an operation on the running event loop. Does not block.

        Errors while starting fail the returned operation and break the world. `timeout_s` breaks the world when the operation is still
        pending after so many seconds; None means no limit.
        Raises WorldError when the world has ended or is still joining.
        """
        loop = asyncio.get_running_loop()
        operation = Operation(plan, timeout_s, loop.create_future(), self._on_cancelled)
        with self._lock:  # `end` must not run between the check and the registration of the operation
            if ending := self._world.ending():
                raise ending
            if not self._opened:
                raise WorldError(self._world.name, "still joining: await its initialisation before using it")
            self._rebind_loop(loop)
            self._pending.add(operation)
            try:
                self._dispatch(operation)
            except Exception as error:  # noqa: BLE001 - the operation may have started: the world breaks
                self._fail([operation], operation.peer, error)
            except BaseException:
                self._pending.discard(operation)
                raise
        operation.posted = True
        if timeout_s is not None and not operation.done():
            operation.timer = loop.call_later(timeout_s, self._on_timeout, operation)
        return operation

    def _rebind_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Move the connections to the poller of `loop` if the event loop that served them has ended."""
        if self._poller is None or self._poller.serves(loop) or self._poller.running:
            return
        self._poller = poller_of(loop)
        for connection in self._connections.values():
            connection.move(self._poller)

    def _dispatch(self, operation: Operation) -> None:
        """Hand the operation to its connection or to NCCL, or run the algorithm of a collective."""
        plan = operation.plan
        if plan.tensors and plan.tensors[0].is_cuda:
            operation.stream = torch.cuda.current_stream(plan.tensors[0].device)
        if isinstance(plan, Send) and plan.post is None:
            self._start_send(operation, plan)
        elif isinstance(plan, Receive) and plan.post is None:
            self._start_receive(operation, plan)
        elif isinstance(plan, Send | Receive):
            self._post(operation)
        else:
            self._start_collective(operation, plan)

    # -- operations on connections -----------------------------------------------------------------------------------------------

    def _start_send(self, operation: Operation, plan: Send) -> None:
        """Queue a send on its connection. It is queued before its data is copied from a device, to keep the order of messages."""
        if plan.header is None:
            head = message_head(plan.signature, plan.tag, plan.size_bytes)
        else:
            head = HEAD.pack(MESSAGE, plan.tag, plan.size_bytes, plan.header)
        transfer = Transfer(operation, head, lent=plan.header is not None)
        if not plan.staged:
            transfer.set_data(plan.buffer())
        self._connections[plan.peer].send(transfer, plan.tag)
        if plan.staged:
            self._copying.run(partial(self._run_step, operation, partial(self._load, plan, transfer)))

    def _load(self, plan: Send, transfer: Transfer) -> None:
        """Copy the data of a send from its device, then send it."""
        data = plan.buffer()
        with self._lock:
            transfer.set_data(data)
            if connection := self._connections.get(plan.peer):
                connection.send_ready(plan.tag)

    def _start_receive(self, operation: Operation, plan: Receive) -> None:
        """Post a receive on its connection."""
        transfer = Transfer(operation, encode_signature(plan.signature), accept=plan.accept, view=plan.view)
        if plan.buffer is not None:
            transfer.set_data(plan.buffer())
        self._connections[plan.peer].receive(transfer, plan.tag)

    # -- collectives -------------------------------------------------------------------------------------------------------------

    def _start_collective(self, operation: Operation, plan: Collective) -> None:
        """Run a collective in a task of the caller's event loop."""
        if plan.number is None:
            number = self._collectives % NUMBERED_FROM
            self._collectives += 1
        else:
            number = NUMBERED_FROM + plan.number
        channel = CollectiveChannel(operation, self._connections, number, self._lock, self._check)
        # Not loop.create_task: an eager task factory would run it now, under the lock.
        operation.task = asyncio.Task(self._follow(operation, plan, channel), loop=operation.future.get_loop())

    async def _follow(self, operation: Operation, plan: Collective, channel: CollectiveChannel) -> None:
        """Run a collective, after its fingerprints are compared if `verify_collectives` is set, and report its outcome."""
        try:
            if plan.post is not None:
                async with self._nccl_order:  # NCCL needs equal order at all members
                    await self._verify_collective(channel, plan)
                    self._post(operation)
                return
            await self._verify_collective(channel, plan)
            if plan.staged:  # the data is copied from a device, which may block
                algorithm = await asyncio.to_thread(call_on, operation.stream, plan.algorithm)
            else:
                algorithm = plan.algorithm()
            await algorithm(channel)
        except WorldError:
            pass  # the world has ended and fails its pending operations
        except MismatchError as mismatch:
            self._world.report(Cause.ERROR, mismatch.rank, mismatch.detail)
        except Exception as error:  # noqa: BLE001 - see `_fail`
            self._fail([operation], operation.peer, error)
        except asyncio.CancelledError:
            if not operation.done():  # the event loop is shutting down
                self._on_cancelled(operation)
            raise
        else:
            self.on_transferred(operation)
        finally:
            operation.task = None

    async def _verify_collective(self, channel: CollectiveChannel, plan: Collective) -> None:
        if self._verify and channel.peers:
            await verify(channel, plan)

    # -- results of connections --------------------------------------------------------------------------------------------------

    def on_transferred(self, operation: Operation) -> None:
        """A transfer, or the algorithm of a collective, completed: copy the results back if necessary and complete the operation."""
        if operation.collective is not None:
            operation.resolve(None)
        elif operation.plan.copy_back is None:
            self._complete(operation)
        else:
            self._run_on_thread(operation, partial(self._finish, operation))

    def on_connection_lost(self, peer: int, pending: list[Operation], reason: str) -> None:
        operations = list(dict.fromkeys(each.collective or each for each in pending))
        if operations:  # without pending transfers, a later operation reports the loss; the control connection may know the reason by then
            self._fail(operations, peer, ConnectionLostError(reason))

    def unacknowledged(self) -> list[int]:
        """The peers whose hosts acknowledge nothing that is sent. Takes no lock."""
        return [peer for peer, connection in list(self._connections.items()) if connection.is_unacknowledged()]

    def on_error(self, peer: int, cause: Cause, detail: str) -> None:
        self._world.report(cause, self._world.rank if cause is Cause.LOCAL else peer, detail)

    def _check(self) -> None:
        """Raises WorldError when the world has ended. While `draining` is set, pending operations may continue."""
        ending = self._world.ending()
        if ending is not None and (not self._opened or not self.draining):
            raise ending

    # -- operations of NCCL ------------------------------------------------------------------------------------------------------

    def _post(self, operation: Operation) -> None:
        """Hand an operation to NCCL, on a thread, because NCCL may block while it connects. Call it under the lock.

        Raises RuntimeError when no thread can start.
        """
        self._posting.run(partial(self._run_step, operation, partial(self._post_queued, operation)))

    @lost_connections()
    def _post_queued(self, operation: Operation) -> None:
        assert operation.plan.post is not None
        with self._lock:
            self._check()
            group = self._group
        assert group is not None
        operation.work = operation.plan.post(group)
        with self._lock:
            self._on_nccl.append(operation)
            if len(self._on_nccl) == 1:
                self._polling.run(self._poll_nccl)

    def _poll_nccl(self) -> None:
        """Poll until NCCL has completed all operations. An operation that still runs `NCCL_ABORT_S` after the world ended is failed."""
        aborted_s: float | None = None
        while True:
            with self._lock:
                for operation in [each for each in self._on_nccl if each.work is None or each.work.is_completed()]:
                    self._on_nccl.remove(operation)
                    self._run_on_thread(operation, partial(self._finish, operation))
                if aborted_s is None and self._world.ending() is not None:
                    aborted_s = time.monotonic() + NCCL_ABORT_S
                if aborted_s is not None and time.monotonic() > aborted_s and self._on_nccl:
                    lost, self._on_nccl = self._on_nccl, []
                    self._fail(lost, -1, RuntimeError("NCCL still runs the operation after its abort"))
                if not self._on_nccl:
                    return
            time.sleep(NCCL_POLL_S)

    # -- steps on threads ------------------------------------------------------------------------------------

    def _run_on_thread(self, operation: Operation, job: Callable[[], None]) -> None:
        """Run `job` on the thread for copies. Fails the operation when no thread can start."""
        try:
            self._copying.run(job)
        except Exception as error:  # noqa: BLE001 - see `_fail`
            self._fail([operation], operation.peer, error)

    def _finish(self, operation: Operation) -> None:
        """Check the result of NCCL if it ran the operation, copy the results back, and complete the operation."""

        def finish() -> None:
            if operation.work is not None:
                with lost_connections():
                    operation.work.wait()  # it is complete: raises its error, or orders the current stream after it
                self._check()  # operations that NCCL aborts look complete
            self._copy_back(operation)
            await_queued(operation.stream)

        if self._run_step(operation, finish):
            self._complete(operation)

    def _run_step(self, operation: Operation, step: Callable[[], None]) -> bool:
        """Run a step of the operation on its stream. On an error, fail the operation and return False."""
        try:
            call_on(operation.stream, step)
        except Exception as error:  # noqa: BLE001 - see `_fail`
            self._fail([operation], operation.peer, error)
        else:
            return True
        return False

    def _copy_back(self, operation: Operation) -> None:
        """Copy the results to the caller's tensors, if necessary.

        Raises RuntimeError if the operation has already failed; nothing is written then.
        """
        if operation.plan.copy_back is None:
            return
        with self._lock:
            if operation not in self._pending:
                raise RuntimeError("the world has ended")
            self._copying_back.add(operation)
        operation.plan.copy_back()

    # -- completing and failing --------------------------------------------------------------------------------------------------

    def _complete(self, operation: Operation) -> None:
        """The operation succeeded and its results are in the caller's tensors."""
        # Does not take the lock, because another thread may hold it while it copies.
        self._pending.discard(operation)
        self._copying_back.discard(operation)
        operation.work = None
        operation.resolve(None)

    def _fail(self, operations: Sequence[Operation], peer: int, error: Exception) -> None:
        """Fail the operations and break the world. Their callers get the error of the world, when it is known.

        A ConnectionLostError is attributed to its peer, by default to `peer`. Any other error (no memory, no thread, refused by the
        backend) is a failure of this member.
        """
        error = error.with_traceback(None)  # a traceback keeps tensors alive
        with self._lock:
            self._pending.difference_update(operations)
            self._copying_back.difference_update(operations)
            ending = self._world.ending()
            if ending is None or self.draining:
                self._failed += operations
        for operation in operations:
            operation.work = None
        if ending is None:
            detail = f"{operations[0].name}: {described(error)}"
            if isinstance(error, ConnectionLostError):
                self._world.report(Cause.TRANSPORT, peer if error.peer is None else error.peer, detail)
            else:
                self._world.report(Cause.LOCAL, self._world.rank, detail)
        elif not self.draining:
            self._resolve(operations)

    def _on_timeout(self, operation: Operation) -> None:
        """The caller's timeout has expired."""
        if operation in self._pending:
            detail = f"{operation.name} took longer than {operation.timeout_s:g} s"
            self._world.fail(Cause.TIMEOUT, operation.peer, detail)

    def _on_cancelled(self, operation: Operation) -> WorldError | None:
        """The caller was cancelled, or its event loop shuts down: break the world. Returns the error that the world ended with."""
        self._world.fail(Cause.ABORTED, self._world.rank, f"{operation.name} cancelled")
        return self._world.ending()

    def _resolve(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            operation.work = None
            operation.resolve(self._world.ending())

    # -- teardown (on the thread that tears the world down) -------------------------------------------------------------------------

    def leave(self, timeout_s: float) -> None:
        """A member leaves: fail the pending operations and write nothing more. What is written arrives (see `half_close`).

        Waits at most `timeout_s` seconds until the peers have read it and closed their connections, too.
        """
        with self._lock:
            connections = list(self._connections.values())
            for connection in connections:
                connection.half_close()
        self._fail_all(except_copying_back=True)
        until_s = time.monotonic() + timeout_s
        for connection in connections:
            connection.await_end(until_s)

    def drain(self, timeout_s: float) -> None:
        """Another member has left: wait at most `timeout_s` seconds for the pending operations. Then no operation fails before it must.

        Reads the connections here, too, because the event loop may be blocked.
        """
        until_s = time.monotonic() + timeout_s
        while self._pending and time.monotonic() < until_s:
            time.sleep(_READ_S)
            with self._lock:
                for connection in self._connections.values():
                    connection.read()

    def end(self) -> ProcessGroup | None:
        """Close the connections and fail the pending operations, except those whose results are being copied to the caller's tensors.

        Returns the process group, which the caller must abort. No operation is posted to it any more, but it may write to tensors until
        it is destroyed.
        """
        with self._lock:
            self.draining = self._opened = False
            group, self._group = self._group, None
            self._close_connections()
        self._fail_all(except_copying_back=True)
        return group

    def join(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the threads, then fail all operations that remain. Call it after the group is aborted.

        Returns False when a thread is still running, for example blocked in NCCL.
        """
        until_s = time.monotonic() + timeout_s
        threads = self._posting, self._polling, self._copying
        ended = [thread.close(max(0.0, until_s - time.monotonic())) for thread in threads]
        self.close()
        return all(ended)

    def close(self) -> None:
        """Close the connections and fail all operations that are still pending. Idempotent."""
        with self._lock:
            self._close_connections()
        self._fail_all()

    def _fail_all(self, *, except_copying_back: bool = False) -> None:
        """Resolve all operations with the error of the ended world. Idempotent.

        Args:
            except_copying_back: keep the operations whose results are being copied to the caller's tensors.
        """
        with self._lock:
            self.draining = False
            if not except_copying_back:
                self._copying_back = set()
            operations, self._failed = [*self._failed, *(self._pending - self._copying_back)], []
            self._pending &= self._copying_back
        self._resolve(operations)

    def _close_connections(self) -> None:
        connections, self._connections = self._connections, {}  # an ended world may be kept by name: free the buffers
        for connection in connections.values():
            connection.close()
