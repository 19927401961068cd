"""Runs the operations of one world: hands each to a connection or to c10d, waits without blocking the caller, completes or fails it.

A send or receive uses the connection to its peer (multiworld/transport/connection.py), on the event loop on which the world was
formed. So do collectives that have an algorithm for these connections (multiworld/collectives) and the comparison of fingerprints before
collectives. Operations of c10d (NCCL, or Gloo on request) complete through c10d's future. Work that may block (copies from and to a
device, NCCL) runs on threads of this world. One thread posts all NCCL operations in the order in which they were started. Other threads
poll for their completion, because an event on a stream of torch's pool might wait for another world that uses the same stream.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from multiworld.collectives.scheduler import CollectiveScheduler
from multiworld.errors import WorldError
from multiworld.execution.blocking_pool import BlockingPool
from multiworld.execution.cuda import await_queued, on_stream
from multiworld.execution.failures import ConnectionLostError, described, lost_connections
from multiworld.execution.process_group import FOREVER, NCCL_ABORT_S, wait_for_nccl
from multiworld.execution.serial_queue import SerialQueue
from multiworld.ops.operation import Operation, Plan, SubOperation
from multiworld.ops.pending import OperationWorld, PendingOperations
from multiworld.transport.connection import PeerConnection
from multiworld.transport.poller import Poller, poller_of
from multiworld.transport.segments import SegmentPool
from multiworld.transport.shared import SharedMemoryConnection
from multiworld.transport.transfer import Transfer
from multiworld.transport.wire import HEAD, MESSAGE, encode_signature, message_head


class Transport(StrEnum):
    """How two members of a world exchange data."""

    SHARED_MEMORY = "shared memory"
    TCP = "tcp"


class OperationExecutor(PendingOperations):
    """Starts, completes and fails the operations of one world.

    Args:
        lock: the lock of the world. No operation is posted after the world has ended.
        verify_collectives: whether to compare fingerprints before every collective; not in a world with NCCL only.
    """

    def __init__(self, world: OperationWorld, lock: threading.RLock, *, verify_collectives: bool) -> None:
        super().__init__(world, lock)
        self._group: ProcessGroup | None = None
        self._connections: dict[int, PeerConnection] = {}
        self._poller: Poller | None = None
        self._pool = BlockingPool(f"multiworld-{world.name}", lambda error: world.on_local_failure(described(error)))
        self._gloo_queue = SerialQueue(self._pool)
        self._nccl_queue = SerialQueue(self._pool)  # a communicator takes its operations one at a time
        self._scheduler = CollectiveScheduler(self, lock, self._pool, verify_collectives=verify_collectives)

    def open(
        self, group: ProcessGroup, socks: dict[int, socket.socket], poller: Poller, segments: SegmentPool | None
    ) -> None:
        """Allow operations to start. Takes ownership of `socks`, the connected sockets by rank; a Unix socket needs `segments`.

        Raises OSError when the kernel cannot poll them; all of them are closed then.
        """
        try:
            for peer, sock in socks.items():
                if sock.family == socket.AF_UNIX and segments is not None:
                    connection: PeerConnection = SharedMemoryConnection(peer, sock, self._lock, self, poller, segments)
                else:
                    connection = PeerConnection(peer, sock, self._lock, self, poller)
                self._connections[peer] = connection
        except OSError:
            self._close_connections()
            for sock in socks.values():
                sock.close()
            raise
        self._group = group
        self._poller = poller

    @property
    def transports(self) -> dict[int, Transport]:
        """How this member is connected to each of the others, by rank."""
        return {
            peer: Transport.SHARED_MEMORY if isinstance(connection, SharedMemoryConnection) else Transport.TCP
            for peer, connection in self._connections.items()
        }

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
            self._rebind_loop(loop)
            self._pending.add(operation)
            try:
                self._dispatch(operation)
            except Exception as error:  # noqa: BLE001 - the operation may have started: the world breaks
                self.fail([operation], operation.peer, error)
            except BaseException:
                self._pending.discard(operation)
                raise
        operation.posted = True
        if timeout_s is not None and not operation.done():
            operation.timer = loop.call_later(timeout_s, self.on_timeout, operation)
        return operation

    def _rebind_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Move the connections to the poller of `loop` if the event loop that served them has ended."""
        if self._poller is None or self._poller.serves(loop) or self._poller.running:
            return
        self._poller = poller_of(loop)
        for connection in self._connections.values():
            connection.move(self._poller)

    def _dispatch(self, operation: Operation) -> None:
        """Hand the operation to its connection, to the collective scheduler, or to `post`."""
        plan = operation.plan
        if plan.tensors and plan.tensors[0].is_cuda:
            operation.stream = torch.cuda.current_stream(plan.tensors[0].device)
        if plan.peer >= 0 and not _on_nccl(plan):
            if plan.name == "send":
                self._start_send(operation)
            else:
                self._start_receive(operation)
        elif plan.peer < 0 and self._scheduler.handles(operation, self._connections):
            self._scheduler.start(operation, self._connections)
        else:
            self.post(operation)

    # -- operations on connections -----------------------------------------------------------------------------------------------

    def _start_send(self, operation: Operation) -> None:
        """Queue a send on its connection. It is queued before its data is copied from a device, to keep the order of messages."""
        plan = operation.plan
        assert plan.buffer is not None
        if plan.header is None:
            head = message_head(plan.signature, plan.tag, plan.size_bytes)
        else:
            head = HEAD.pack(MESSAGE, plan.tag, plan.size_bytes, plan.header)
        transfer = Transfer(operation, head)
        if not plan.staged:
            transfer.set_data(plan.buffer())
        self._connections[plan.peer].send(transfer, plan.tag)
        if plan.staged:
            self._pool.run(partial(self._run_step, operation, partial(self._load, operation, transfer)))

    def _load(self, operation: Operation, transfer: Transfer) -> None:
        """Copy the data of a send from its device, then send it."""
        assert operation.plan.buffer is not None
        data = operation.plan.buffer()
        with self._lock:
            transfer.set_data(data)
            self._connections[operation.peer].send_ready(operation.plan.tag)

    def _start_receive(self, operation: Operation) -> None:
        """Post a receive on its connection."""
        plan = operation.plan
        transfer = Transfer(operation, encode_signature(plan.signature), accept=plan.accept, view=plan.view)
        if plan.buffer is not None:
            transfer.set_data(plan.buffer())
        self._connections[plan.peer].receive(transfer, plan.tag)

    def on_transferred(self, operation: Operation | SubOperation) -> None:
        """A transfer, or the algorithm of a collective, completed: copy the results back if necessary and complete the operation."""
        if isinstance(operation, SubOperation):
            operation.on_transferred()
        elif operation.plan.copy_back is None:
            self.complete(operation)
        else:
            self._run_in_pool(operation, partial(self._finish, operation))

    def on_connection_lost(self, peer: int, pending: list[Operation | SubOperation], reason: str) -> None:
        operations = list(dict.fromkeys(each.parent if isinstance(each, SubOperation) else each for each in pending))
        if operations:  # without pending transfers, a later operation reports the loss; the control connection may know the reason by then
            self.fail(operations, peer, ConnectionLostError(reason))

    def on_protocol_error(self, peer: int, detail: str) -> None:
        self._world.on_protocol_error(peer, detail)

    def on_local_error(self, peer: int, error: Exception) -> None:
        self._world.on_local_failure(f"reading from rank {peer}: {described(error)}")

    def read(self) -> None:
        """Read and handle received data of all connections now, because the event loop may be blocked."""
        with self._lock:
            for connection in self._connections.values():
                connection.read()

    # -- operations of c10d ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises WorldError when the world has ended. While `draining` is set, pending operations may continue."""
        ending = self._world.ending()
        if ending is not None and (self._group is None or not self.draining):
            raise ending

    def post(self, operation: Operation) -> None:
        """Hand a collective, or an operation for NCCL, to c10d: directly, or through a serial queue if that may block or break the order.

        Call it under the world's lock. Raises RuntimeError when c10d refuses, a connection is lost, or no thread can start.
        """
        plan, on_nccl = operation.plan, _on_nccl(operation.plan)
        queue = self._nccl_queue if on_nccl else self._gloo_queue
        # Copies from a device may block, and so may NCCL, which connects lazily.
        if plan.staged or on_nccl or queue.unposted:
            queue.unposted += 1
            queue.run(partial(self._run_blocking, operation, queue))
        elif self._group is not None:
            assert plan.post is not None
            with lost_connections():
                operation.works = [plan.post(self._group)]
            operation.works[0].get_future().add_done_callback(partial(self._on_gloo_done, operation))

    def _on_gloo_done(self, operation: Operation, future: "torch.futures.Future[Any]") -> None:
        """A collective of Gloo completed or failed. Called on a thread of Gloo, or immediately if it was already complete."""
        try:
            with lost_connections():
                future.value()
            self.copy_back(operation)
        except Exception as error:  # noqa: BLE001 - see `fail`
            self.fail([operation], operation.peer, error)
        else:
            self.complete(operation)

    def _run_blocking(self, operation: Operation, queue: SerialQueue) -> None:
        """Post a queued operation and complete it. Runs on a thread of the blocking pool.

        NCCL operations are completed on another thread, because their completion may depend on operations that are queued behind them.
        """
        if not self._run_step(operation, partial(self._post_queued, operation, queue)):
            return
        if _on_nccl(operation.plan):
            self._run_in_pool(operation, partial(self._finish, operation))
        else:
            self._finish(operation)

    @lost_connections()
    def _post_queued(self, operation: Operation, queue: SerialQueue) -> None:
        """Hand a queued operation to c10d, to Gloo under the world's lock. Raises WorldError when the world has ended (see `check`)."""
        post, on_nccl = operation.plan.post, _on_nccl(operation.plan)
        assert post is not None
        try:
            with self._lock:
                self.check()
                group = self._group
                assert group is not None
                if not on_nccl:
                    operation.works = [post(group)]
            if on_nccl:
                operation.works = [post(group)]
        finally:
            with self._lock:
                queue.unposted -= 1

    @lost_connections()
    def _wait(self, operation: Operation) -> None:
        """Block until c10d completes the operation. Raises RuntimeError when it failed; with NCCL, WorldError when the world ended."""
        if not _on_nccl(operation.plan):
            for work in operation.works:
                work.wait(FOREVER)
            return
        for work in operation.works:
            self._wait_for_nccl(work)
        self.check()  # operations that NCCL aborts look complete

    def _wait_for_nccl(self, work: Work) -> None:
        """Wait for `work`. Raises RuntimeError when it failed, or still runs `NCCL_ABORT_S` seconds after the world ended."""
        until_s: float | None = None

        def check_aborted() -> None:
            nonlocal until_s
            if until_s is None and self._world.ending() is not None:
                until_s = time.monotonic() + NCCL_ABORT_S
            if until_s is not None and time.monotonic() > until_s:
                raise RuntimeError("NCCL still runs the operation after its abort")

        wait_for_nccl(work, check_aborted)

    # -- steps on threads of the blocking pool ------------------------------------------------------------------------------------

    def _run_in_pool(self, operation: Operation, job: Callable[[], None]) -> None:
        """Run `job` on the blocking pool. Fails the operation when no thread can start."""
        try:
            self._pool.run(job)
        except Exception as error:  # noqa: BLE001 - see `fail`
            self.fail([operation], operation.peer, error)

    def _finish(self, operation: Operation) -> None:
        """Wait for c10d if it runs the operation, copy the results back, and complete the operation."""

        def finish() -> None:
            self._wait(operation)
            self.copy_back(operation)
            await_queued(operation.stream)

        if self._run_step(operation, finish):
            self.complete(operation)

    def _run_step(self, operation: Operation, step: Callable[[], None]) -> bool:
        """Run a step of the operation on its stream. On an error, fail the operation and return False."""
        try:
            with on_stream(operation.stream):
                step()
        except Exception as error:  # noqa: BLE001 - see `fail`
            self.fail([operation], operation.peer, error)
        else:
            return True
        return False

    # -- teardown (on the thread that tears the world down) -------------------------------------------------------------------------

    def end(self) -> ProcessGroup | None:
        """Close the connections and fail the pending operations, except those whose results are being copied to the caller's tensors.

        Returns the process group, which the caller must abort. No operation is posted to it any more, but it may write to tensors until
        it is destroyed.
        """
        with self._lock:
            self.draining = False
            group, self._group = self._group, None
            self._close_connections()
        self.fail_all(except_copying_back=True)
        return group

    def join(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the threads, then fail all operations that remain. Call it after the group is aborted.

        Returns False when a thread is still running, for example blocked in c10d.
        """
        ended = self._pool.close(timeout_s)
        self.close()
        return ended

    def close(self) -> None:
        """Close the connections and fail all operations that are still pending. Idempotent."""
        with self._lock:
            self._close_connections()
        self.fail_all()

    def _close_connections(self) -> None:
        for connection in self._connections.values():
            connection.close()


def _on_nccl(plan: Plan) -> bool:
    """Whether NCCL runs the operation: its tensors are CUDA tensors that are not copied through host memory."""
    return bool(plan.tensors) and plan.tensors[0].is_cuda and not plan.staged
