"""The pending operations of a world, and the connections that carry them. Each operation has its own states:

    start ──▶ pending ──▶ copying back ──▶ done
                 └──────────────┴────────▶ failed    with the error of the world, when that is known

A send or receive uses the connection to its peer (multiworld/transport/connection.py), on the event loop on which the world was
formed. So do collectives (multiworld/collectives), except those that NCCL carries. Copies from and to a device may block, so they run on
a thread of this world.

One lock guards connections and operations. It is held while tensors are copied and while callbacks of the caller run, so the control loop,
which serves all worlds of the process, must never wait for it.
"""

import asyncio
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from multiworld.collectives.channel import NUMBERED_FROM, CollectiveChannel
from multiworld.collectives.fingerprint import verify
from multiworld.config import WorldConfig
from multiworld.errors import Cause, WorldError
from multiworld.execution import cuda
from multiworld.execution.failures import ConnectionLostError, MismatchError, described
from multiworld.execution.threads import WorkerThread
from multiworld.membership.forming import FormingWorld
from multiworld.ops.buffers import contiguous
from multiworld.ops.operation import NO_MEMORY, Collective, Message, Operation, Receive, Send
from multiworld.transport.connection import PeerConnection, SocketPayloads
from multiworld.transport.poller import Poller, poller_of
from multiworld.transport.shared import SharedPayloads
from multiworld.transport.waiter import await_transfer
from multiworld.transport.wire import MESSAGE, encode_signature, message_head, pack_head

_DRAIN_S = 0.2
"""When a member leaves, pending operations of the other members have this long to complete."""
_READ_S = 0.02
"""Interval at which connections are read while operations are drained."""


class OwningWorld(FormingWorld, Protocol):
    """The part of a world that its operations use."""

    def report(self, cause: Cause, rank: int, detail: str) -> None:
        """See `World.report`. May be called from any thread."""


class PendingOperations:
    """Starts the operations of one world, and completes or fails them.

    Attributes:
        draining: a member left. Pending operations may still complete. The others fail when the world is torn down.
    """

    def __init__(self, world: OwningWorld, config: WorldConfig) -> None:
        self.draining = False
        self._world = world
        self._config = config
        self._lock = threading.RLock()
        self._poller: Poller | None = None
        self._connections: dict[int, PeerConnection] = {}
        self._pending: set[Operation] = set()
        self._next_check_s = math.inf  # of `due_s`
        self._copying_back: set[Operation] = set()
        self._failed: list[Operation] = []  # they get the error of the world when it has ended
        self._copying = WorkerThread(f"multiworld-{config.name}")
        self._collectives = 0  # number of the next collective without one
        self._posted = Future[None]()  # done when the latest collective of NCCL is posted, or has failed before
        self._posted.set_result(None)

    def use_loop(self) -> None:
        """Serve the connections on the running event loop."""
        self._poller = poller_of(asyncio.get_running_loop())

    def connect(self, socks: dict[int, socket.socket]) -> None:
        """Use the connected sockets, by rank. Raises OSError when the kernel cannot poll them; the caller closes them then."""
        assert self._poller is not None
        with self._lock:
            try:
                for peer, sock in socks.items():
                    local = sock.family == socket.AF_UNIX
                    payloads = SharedPayloads(self._config.segments) if local else SocketPayloads()
                    self._connections[peer] = PeerConnection(peer, sock, self._lock, self, self._poller, payloads)
            except OSError:
                self._close_connections()
                raise

    def unacknowledged(self) -> list[int]:
        """Return the ranks whose hosts do not acknowledge the data that was sent to them. Takes no lock."""
        return [peer for peer, connection in list(self._connections.items()) if connection.is_unacknowledged()]

    def start(self, operation: Operation, timeout_s: float | None) -> Operation:
        """See `World.start`."""
        loop = asyncio.get_running_loop()
        operation.timeout_s, operation.future = timeout_s, loop.create_future()
        operation.on_cancelled = self._on_cancelled
        with self._lock:
            self._register(operation, loop)
        operation.posted = True
        if timeout_s is not None and not operation.done():
            operation.timer = loop.call_later(timeout_s, self._on_timeout, operation)
        return operation

    def start_on_thread(self, operation: Message, timeout_s: float | None) -> Callable[[float | None], None]:
        """See `World.start_on_thread`."""
        assert operation.outcome is not None
        operation.timeout_s = timeout_s
        with self._lock:
            self._register(operation, None)
            if timeout_s is not None and not operation.outcome.done():
                operation.due_s = time.monotonic() + timeout_s
                self._check_due(operation.due_s)
            return partial(await_transfer, self._connections.get(operation.peer), operation.outcome)

    def _register(self, operation: Operation, loop: asyncio.AbstractEventLoop | None) -> None:
        """Start an operation, under the lock: the teardown must not run between the check and the registration."""
        if ending := self._world.ending():
            raise ending
        if loop is not None and self._poller is not None and self._poller.is_abandoned(loop):
            self._poller = poller_of(loop)  # the event loop that served the connections has ended
            for connection in self._connections.values():
                connection.move(self._poller)
        self._pending.add(operation)
        try:
            self._dispatch(operation)
        except Exception as error:  # noqa: BLE001 - the operation may have started: the world breaks
            self.fail([operation], error)

    def _check_due(self, at_s: float) -> None:
        """Check at `at_s` for operations of threads that are due. One timer of the event loop serves many operations."""
        if at_s < self._next_check_s and self._poller is not None:
            self._next_check_s = at_s
            self._poller.call_later(at_s - time.monotonic(), self._on_due)

    def _on_due(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            self._next_check_s = math.inf
            pending = [*self._pending, *self._copying_back]
            self._check_due(min((each.due_s for each in pending if each.due_s > now_s), default=math.inf))
        for operation in (each for each in pending if each.due_s <= now_s):
            self._on_timeout(operation)

    def _dispatch(self, operation: Operation) -> None:
        """Hand the operation to its connection, or start the collective."""
        operation.capture_stream()
        if isinstance(operation, Collective):
            self._start_collective(operation)
        elif isinstance(operation, Send):
            self._start_send(operation)
        elif isinstance(operation, Receive):
            operation.head = encode_signature(operation.signature)
            self._connections[operation.peer].receive(operation)

    # -- operations on connections -----------------------------------------------------------------------------------------------

    def _start_send(self, operation: Send) -> None:
        """Queue a send on its connection. It is queued before its data is copied from a device, to keep the order of messages."""
        (tensor,) = operation.tensors
        if operation.header is None:
            operation.head = message_head(operation.signature, operation.tag, tensor.nbytes)
        else:
            operation.head = pack_head(MESSAGE, operation.tag, tensor.nbytes, operation.header)
        self._connections[operation.peer].send(operation)
        if operation.staged:
            self._copying.run(partial(self._run_step, self._load, operation))

    def _load(self, operation: Send) -> None:
        """Copy the data of a send from its device, then send it."""
        data = contiguous(operation.tensors[0], on_host=True)
        with self._lock:
            operation.set_data(data)
            if connection := self._connections.get(operation.peer):
                connection.send_ready(operation.tag)

    # -- collectives -------------------------------------------------------------------------------------------------------------

    def _start_collective(self, operation: Collective) -> None:
        """Run a collective in a task of the caller's event loop."""
        if operation.number is None:
            number = self._collectives
            self._collectives = (number + 1) % NUMBERED_FROM
        else:
            number = NUMBERED_FROM + operation.number
        channel = CollectiveChannel(operation, self._connections, number, self._lock, self.check)
        previous = self._posted if operation.post is not None else None
        # Not loop.create_task: an eager task factory would run it now, under the lock.
        operation.task = asyncio.Task(self._follow(operation, channel, previous), loop=operation.future.get_loop())
        if previous is not None:
            self._posted = posted = Future[None]()
            operation.task.add_done_callback(lambda _: posted.set_result(None))

    async def _follow(self, operation: Collective, channel: CollectiveChannel, previous: Future[None] | None) -> None:
        """Run a collective, after its fingerprints are compared if `verify_collectives` is set, and report its outcome.

        One of NCCL waits until the `previous` one is posted, maybe on another event loop, because NCCL needs equal order at all members.
        """
        try:
            if previous is not None:
                await asyncio.shield(asyncio.wrap_future(previous))
            if self._config.verify_collectives and channel.peers:
                await verify(channel, operation)
            if operation.post is not None:
                with self._lock:
                    self.check()
                    assert self._world.nccl is not None
                    self._world.nccl.post(operation)
                return
            if operation.staged:  # the data is copied from a device, which may block
                algorithm = await asyncio.to_thread(cuda.call_on, operation.stream, operation.algorithm)
            else:
                algorithm = operation.algorithm()
            await algorithm(channel)
            self.on_transferred(operation)
        except WorldError:
            pass  # the world has ended and fails its pending operations
        except MismatchError as mismatch:
            self._world.report(Cause.ERROR, mismatch.rank, mismatch.detail)
        except Exception as error:  # noqa: BLE001 - see `fail`
            self.fail([operation], error)
        except asyncio.CancelledError:
            if not operation.done():  # the event loop is shutting down
                self._on_cancelled(operation)
            raise
        finally:
            operation.task = None

    # -- results of connections --------------------------------------------------------------------------------------------------

    def on_transferred(self, operation: Operation) -> None:
        """A transfer or an algorithm completed: copy the results back if necessary. Raises RuntimeError when no thread can start."""
        if isinstance(operation, Message):
            operation.data, operation.memory = None, NO_MEMORY  # the caller may keep the operation
            if operation.collective is not None:
                operation.resolve(None)
                return
        if operation.copy_back is None:
            self._complete(operation)
        else:
            self._copying.run(partial(self._run_step, self._copy_back, operation))

    def on_connection_lost(self, peer: int, pending: list[Message], reason: str) -> None:
        if operations := list(dict.fromkeys(each.collective or each for each in pending)):
            # Else a later operation reports the loss; the control connection may know the reason by then.
            self.fail(operations, ConnectionLostError(reason, peer))

    def on_error(self, peer: int, cause: Cause, detail: str) -> None:
        self._world.report(cause, self._config.rank if cause is Cause.LOCAL else peer, detail)

    def check(self) -> None:
        """Raises WorldError when the world has ended. While another member leaves, pending operations may continue."""
        ending = self._world.ending()
        if ending is not None and not self.draining:
            raise ending

    # -- steps on threads ------------------------------------------------------------------------------------

    def _copy_back(self, operation: Operation) -> None:
        """Copy the results back, and complete the operation."""
        assert operation.copy_back is not None
        with self._lock:
            if operation not in self._pending:  # it has failed: nothing may be written any more
                raise RuntimeError("the world has ended")
            self._pending.remove(operation)
            self._copying_back.add(operation)
        operation.copy_back()
        cuda.await_queued(operation.stream)
        self._complete(operation)

    def _run_step(self, step: Callable[[Any], None], operation: Operation) -> None:
        """Run a step of the operation on its stream. An error fails the operation."""
        try:
            cuda.call_on(operation.stream, partial(step, operation))
        except Exception as error:  # noqa: BLE001 - see `fail`
            self.fail([operation], error)

    # -- completing and failing --------------------------------------------------------------------------------------------------

    def _complete(self, operation: Operation) -> None:
        """The operation succeeded and its results are in the caller's tensors."""
        # Does not take the lock, because another thread may hold it while it copies.
        self._pending.discard(operation)
        self._copying_back.discard(operation)
        operation.resolve(None)

    def fail(self, operations: Sequence[Operation], error: Exception) -> None:
        """Fail the operations and break the world. Their callers get the error of the world, when it is known.

        A ConnectionLostError is attributed to its peer. Any other error (no memory, no thread, refused by the backend) is a failure of this
        member.
        """
        error = error.with_traceback(None)  # a traceback keeps tensors alive
        detail = f"{operations[0].name}: {described(error)}"
        with self._lock:
            self._pending.difference_update(operations)
            self._copying_back.difference_update(operations)
            known = self._world.ending() is not None and not self.draining
            if not known:
                self._failed += operations
        if known:
            for operation in operations:
                operation.resolve(self._world.ending())
        elif isinstance(error, ConnectionLostError):
            self._world.report(Cause.TRANSPORT, error.peer, detail)
        else:
            self._world.report(Cause.LOCAL, self._config.rank, detail)

    def _on_timeout(self, operation: Operation) -> None:
        """The caller's timeout has expired."""
        if operation in self._pending or operation in self._copying_back:
            detail = f"{operation.name} took longer than {operation.timeout_s:g} s"
            self._world.fail(Cause.TIMEOUT, operation.peer, detail)

    def _on_cancelled(self, operation: Operation) -> WorldError | None:
        """The caller was cancelled, or its event loop shuts down: break the world. Returns the error that the world ended with.

        The caller may change the tensors afterwards, so nothing more is sent.
        """
        self._world.fail(Cause.ABORTED, self._config.rank, f"{operation.name} cancelled")
        with self._lock:
            self._close_connections()
        return self._world.ending()

    # -- ending --------------------------------------------------------------------------------------------------------------

    def end(self, *, leaving: bool, leave_s: float, join_s: float) -> bool:
        """Fail the operations and free everything, on the thread that tears the world down. Returns whether all threads have ended.

        Args:
            leaving: this member leaves, and waits at most `leave_s` seconds until the others have closed their data connections.
            join_s: seconds to wait for NCCL, and then for the thread.
        """
        try:
            if self.draining:
                self._drain(min(leave_s, _DRAIN_S))
            if self.draining or leaving:
                self._leave(leave_s)
            with self._lock:
                nccl, self._world.nccl = self._world.nccl, None
                self._close_connections()
                self._fail_pending()
            error = self._world.ending()
            assert error is not None
            aborted = nccl is None or nccl.abort(error, join_s)
            return self._copying.close(join_s) and aborted
        finally:  # also when something could not be freed
            with self._lock:
                self._close_connections()
                self._pending |= self._copying_back
                self._fail_pending()

    def _drain(self, timeout_s: float) -> None:
        """Another member has left: wait at most `timeout_s` seconds for the pending operations. Then no operation fails before it must.

        Reads the connections here, too, because the event loop may be blocked. Counts reads and not time, so that a process that gets no
        CPU time does not lose what has arrived.
        """
        for _ in range(round(timeout_s / _READ_S)):
            if not (self._pending or self._copying_back):
                return
            time.sleep(_READ_S)
            with self._lock:
                for connection in self._connections.values():
                    connection.on_event(select.EPOLLIN)

    def _leave(self, timeout_s: float) -> None:
        """A member leaves: fail the pending operations and write nothing more. What is written arrives (see `half_close`).

        Waits at most `timeout_s` seconds until the peers have read it and closed their connections, too.
        """
        with self._lock:
            connections = list(self._connections.values())
            for connection in connections:
                connection.half_close()
        self._fail_pending()
        until_s = time.monotonic() + timeout_s
        for connection in connections:
            connection.await_end(until_s)

    def _fail_pending(self) -> None:
        """Resolve the pending operations with the error of the ended world, but not those whose results are being copied back."""
        with self._lock:
            self.draining = False
            operations, self._failed, self._pending = [*self._failed, *self._pending], [], set()
        for operation in operations:
            operation.resolve(self._world.ending())

    def _close_connections(self) -> None:
        connections, self._connections = self._connections, {}  # an ended world may be kept by name: free the buffers
        for connection in connections.values():
            connection.close()
