"""One world: its state, its connections, its operations and its end.

`TRANSITIONS` is the table of its states. Only `fail` makes a world `broken`; the thread that first detects the failure calls it. A teardown
thread then aborts the group, fails the pending operations, and frees threads, sockets and memory.

Each operation has its own states:

    start ──▶ pending ──▶ copying back ──▶ done
                 └──────────────┴────────▶ failed    with the error of the world, when that is known

A send or receive uses the connection to its peer (multiworld/transport/connection.py), on the event loop on which the world was
formed. So do collectives (multiworld/collectives), except those that NCCL carries. Copies from and to a device may block, so they run on
a thread of this world.

A world has two locks. One guards its state; it is held for microseconds, because the control loop takes it. The other guards connections
and operations. It is held while tensors are copied and while callbacks of the caller run, so the control loop, which serves all worlds of
the process, must never wait for it.
"""

import _thread
import asyncio
import contextlib
import logging
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from multiworld.collectives.channel import NUMBERED_FROM, CollectiveChannel
from multiworld.collectives.fingerprint import verify
from multiworld.collectives.nccl import NcclCollectives, make_nccl_group
from multiworld.config import WorldConfig
from multiworld.control.loop import ControlLoop
from multiworld.errors import BrokenWorldException, Cause, JoinError, WorldClosedError, WorldError
from multiworld.execution.cuda import await_queued, call_on
from multiworld.execution.failures import ConnectionLostError, MismatchError, described
from multiworld.execution.store import ControlStore
from multiworld.execution.threads import WorkerThread
from multiworld.membership.acceptor import Acceptor
from multiworld.membership.forming import Forming
from multiworld.ops import p2p
from multiworld.ops.buffers import contiguous
from multiworld.ops.operation import NO_MEMORY, Collective, Message, Operation, Receive, Send, View
from multiworld.ops.validation import WorldFacts
from multiworld.transport.connection import PeerConnection, SocketPayloads
from multiworld.transport.poller import Poller, poller_of
from multiworld.transport.shared import SharedPayloads
from multiworld.transport.wire import MESSAGE, encode_signature, message_head, pack_head

logger = logging.getLogger(__name__)

_CAUSE_GRACE_S = 0.5
"""When a data connection fails first, wait this long for the control connection to report the cause."""
_WATCH_S = 1.0
"""Interval at which the data connections are checked."""
_DRAIN_S = 0.2
"""When a member leaves, pending operations of the other members have this long to complete."""
_LEAVE_S = 1.0
"""After one has left, how long each member waits until the others have closed their data connections."""
_TEARDOWN_THREAD_S = 0.5
"""After this time the teardown thread of an ended world counts as not started."""
_JOIN_S = 5.0
"""How long to wait for the threads of an ended world."""
_READ_S = 0.02
"""Interval at which connections are read while operations are drained."""


class Transport(StrEnum):
    """How two members of a world exchange data."""

    SHARED_MEMORY = "shared memory"
    TCP = "tcp"


class WorldState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    BROKEN = "broken"  # a member failed or left
    CLOSED = "closed"  # this process closed it

    @property
    def ended(self) -> bool:
        return not TRANSITIONS[self]


TRANSITIONS: dict[WorldState, tuple[WorldState, ...]] = {
    WorldState.JOINING: (WorldState.READY, WorldState.BROKEN, WorldState.CLOSED),
    WorldState.READY: (WorldState.BROKEN, WorldState.CLOSED),
    WorldState.BROKEN: (),
    WorldState.CLOSED: (),
}
"""For each state of a world: the states that may follow it."""


class World:
    """One member's side of one world. Created by `WorldManager`. Its operations may be awaited on any event loop.

    Attributes:
        name, rank, size: as given to `WorldManager.initialize_world`.
        generation: the number of this world among those of its name; 0 until all ranks have joined, unless the caller chose one.
        state: see the module docstring.
        failure: why the world broke; None unless `state` is BROKEN.
        transport: `SHARED_MEMORY` if this member is connected so to all others, else `TCP`. Valid when the world is ready.

    Args:
        on_changed: called after each change of the state, from any thread. Must not block.
    """

    def __init__(
        self,
        config: WorldConfig,
        control_loop: ControlLoop,
        acceptor: Acceptor | None,
        on_changed: Callable[["World"], None],
    ) -> None:
        self.name = config.name
        self.rank = config.rank
        self.size = config.size
        self.generation = config.generation
        self.state = WorldState.JOINING
        self.failure: BrokenWorldException | None = None
        self.transport = Transport.TCP
        self.undetected_s: float | None = None
        """Seconds without data from the failed member when the world broke, or without a run of its event loop (cause STALLED). None if
        no control connection was lost."""
        self.reclaimed = threading.Event()
        """Set when all threads, sockets and the group of an ended world are freed. Threads that do not return in time are logged."""
        self.facts: WorldFacts = config
        self.acceptor = acceptor
        """Accepts the other members; None unless `rank` is 0."""
        self._config = config
        self._control_loop = control_loop
        self._on_changed = on_changed
        self._state_lock = threading.RLock()
        self._lock = threading.RLock()
        self._teardown_claim = threading.Lock()  # acquired by the first of the two callers
        self._forming = Forming(self, config, control_loop, acceptor)
        self.nccl = self._make_nccl(config.device) if config.device is not None else None
        self._poller: Poller | None = None
        self._connections: dict[int, PeerConnection] = {}
        self._pending: set[Operation] = set()
        self._copying_back: set[Operation] = set()
        self._failed: list[Operation] = []  # they get the error of the world when it has ended
        self._draining = False
        """A member left. Pending operations may still complete. The others fail when the world is torn down."""
        self._copying = WorkerThread(f"multiworld-{config.name}")
        self._collectives = 0  # number of the next collective without one
        self._posted = Future[None]()  # done when the latest collective of NCCL is posted, or has failed before
        self._posted.set_result(None)

    def __repr__(self) -> str:
        return f"<World {self.name!r} generation={self.generation} rank={self.rank}/{self.size} {self.state}>"

    def _make_nccl(self, device: torch.device) -> NcclCollectives:
        logger.warning("world=%s uses NCCL, which is experimental: see docs/gpu.md", self.name)
        store = ControlStore(partial(self._control_loop.call_soon, self._forming.publish), self._config.timeout_s)
        make_group = partial(make_nccl_group, store, self.rank, self.size, device, self._check)
        return NcclCollectives(self.name, store, make_group, self._check, self.on_transferred, self._fail_operations)

    async def open(self) -> None:
        """Join the other members and build the group.

        Raises:
            JoinError: the world did not form within `timeout_s`, or rank 0 refused us.
            BrokenWorldException: a member was lost while the world formed.
            WorldClosedError: `close` was called in the meantime.
        After an error the caller must `close` the world, which frees it. Cancelling breaks it.
        """
        self._poller = poller_of(asyncio.get_running_loop())
        await self._forming.run()

    # -- calls of `Forming` (see `FormingWorld`) ---------------------------------------------------------------------------------

    def on_formed(self, socks: dict[int, socket.socket]) -> None:
        with self._state_lock:
            if error := self.ending():
                raise error
            with self._lock:
                self._connect(socks)
            self._enter(WorldState.READY)
            self._on_changed(self)  # under the lock, so that READY is reported before the end
        if self.transport is Transport.TCP:
            self._control_loop.call_soon(self._watch_connections)

    def _connect(self, socks: dict[int, socket.socket]) -> None:
        """Use the connected sockets, by rank. Raises OSError when the kernel cannot poll them; the caller closes them then."""
        assert self._poller is not None
        if socks and all(sock.family == socket.AF_UNIX for sock in socks.values()):
            self.transport = Transport.SHARED_MEMORY
        try:
            for peer, sock in socks.items():
                local = sock.family == socket.AF_UNIX
                payloads = SharedPayloads(self._config.segments) if local else SocketPayloads()
                self._connections[peer] = PeerConnection(peer, sock, self._lock, self, self._poller, payloads)
        except OSError:
            self._close_connections()
            raise

    def _watch_connections(self) -> None:
        """Break the world if a network drops the data while the heartbeats arrive. Runs on the control loop's thread, takes no lock."""
        if self.state is WorldState.READY:
            for peer, connection in list(self._connections.items()):
                if connection.is_unacknowledged():
                    self.report(Cause.TRANSPORT, peer, "the data sent to it is not acknowledged")
            self._control_loop.loop.call_later(_WATCH_S, self._watch_connections)

    # -- operations ----------------------------------------------------------------------------------------------------------

    def start_send_message(
        self, header: bytes, payload: Tensor | None, dst: int, *, tag: int = 0, timeout_s: float | None = None
    ) -> Operation:
        """Start a send of a message for `recv_view` and return at once. `header` has at most 48 bytes.

        If the payload is of `allocate`, it must not be changed any more: the receiver may read it at any time.
        """
        return self.start(p2p.send_message(self.facts, header, payload, dst, tag), timeout_s=timeout_s)

    async def recv_view(
        self,
        check: Callable[[bytes, int], Tensor | None],
        src: int,
        *,
        tag: int = 0,
        timeout_s: float | None = None,
    ) -> View:
        """Receive a message of unknown size without a copy, if the sender has allocated its payload with `allocate` on this host.

        Otherwise the view has memory of its own. `check(header, size_bytes)` raises ValueError to refuse the message: the world breaks
        with cause `error`. If it returns a contiguous tensor of this size, the data is copied there. It must not block, and may be called
        on another thread.
        """
        view = View(check)
        await self.start(p2p.recv_view(self.facts, view, src, tag), timeout_s=timeout_s).finish()
        return view

    # -- starting ------------------------------------------------------------------------------------------------------------

    def start(self, operation: Operation, *, timeout_s: float | None = None) -> Operation:
        """Start an operation on the running event loop. Does not block. See multiworld/ops/p2p.py and collectives.

        Errors while starting fail the returned operation and break the world. `timeout_s` breaks the world when the operation is still
        pending after so many seconds; None means no limit.
        Raises WorldError when the world has ended or is still joining.
        """
        loop = asyncio.get_running_loop()
        operation.timeout_s, operation.future = timeout_s, loop.create_future()
        operation.on_cancelled = self._on_cancelled
        with self._lock:  # the teardown must not run between the check and the registration of the operation
            if ending := self.ending():
                raise ending
            if self.state is WorldState.JOINING:
                raise WorldError(self.name, "still joining: await its initialisation before using it")
            self._rebind_loop(loop)
            self._pending.add(operation)
            try:
                self._dispatch(operation)
            except Exception as error:  # noqa: BLE001 - the operation may have started: the world breaks
                self._fail_operations([operation], error)
        operation.posted = True
        if timeout_s is not None and not operation.done():
            operation.timer = loop.call_later(timeout_s, self._on_timeout, operation)
        return operation

    def _rebind_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Move the connections to the poller of `loop` if the event loop that served them has ended."""
        if self._poller is not None and self._poller.is_abandoned(loop):
            self._poller = poller_of(loop)
            for connection in self._connections.values():
                connection.move(self._poller)

    def _dispatch(self, operation: Operation) -> None:
        """Hand the operation to its connection, or start the collective."""
        if operation.tensors and operation.tensors[0].is_cuda:
            operation.stream = torch.cuda.current_stream(operation.tensors[0].device)
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
        channel = CollectiveChannel(operation, self._connections, number, self._lock, self._check)
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
                    self._check()
                    assert self.nccl is not None
                    self.nccl.post(operation)
                return
            if operation.staged:  # the data is copied from a device, which may block
                algorithm = await asyncio.to_thread(call_on, operation.stream, operation.algorithm)
            else:
                algorithm = operation.algorithm()
            await algorithm(channel)
            self.on_transferred(operation)
        except WorldError:
            pass  # the world has ended and fails its pending operations
        except MismatchError as mismatch:
            self.report(Cause.ERROR, mismatch.rank, mismatch.detail)
        except Exception as error:  # noqa: BLE001 - see `_fail_operations`
            self._fail_operations([operation], error)
        except asyncio.CancelledError:
            if not operation.done():  # the event loop is shutting down
                self._on_cancelled(operation)
            raise
        finally:
            operation.task = None

    # -- results of connections --------------------------------------------------------------------------------------------------

    def on_transferred(self, operation: Operation) -> None:
        """A transfer, or the algorithm of a collective, completed: copy the results back if necessary and complete the operation.

        Raises RuntimeError when no thread can start.
        """
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
        operations = list(dict.fromkeys(each.collective or each for each in pending))
        if operations:  # without pending transfers, a later operation reports the loss; the control connection may know the reason by then
            self._fail_operations(operations, ConnectionLostError(reason, peer))

    def on_error(self, peer: int, cause: Cause, detail: str) -> None:
        self.report(cause, self.rank if cause is Cause.LOCAL else peer, detail)

    def _check(self) -> None:
        """Raises WorldError when the world has ended. While another member leaves, pending operations may continue."""
        ending = self.ending()
        if ending is not None and not self._draining:
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
        await_queued(operation.stream)
        self._complete(operation)

    def _run_step(self, step: Callable[[Any], None], operation: Operation) -> None:
        """Run a step of the operation on its stream. An error fails the operation."""
        try:
            call_on(operation.stream, partial(step, operation))
        except Exception as error:  # noqa: BLE001 - see `_fail_operations`
            self._fail_operations([operation], error)

    # -- completing and failing --------------------------------------------------------------------------------------------------

    def _complete(self, operation: Operation) -> None:
        """The operation succeeded and its results are in the caller's tensors."""
        # Does not take the lock, because another thread may hold it while it copies.
        self._pending.discard(operation)
        self._copying_back.discard(operation)
        operation.resolve(None)

    def _fail_operations(self, operations: Sequence[Operation], error: Exception) -> None:
        """Fail the operations and break the world. Their callers get the error of the world, when it is known.

        A ConnectionLostError is attributed to its peer. Any other error (no memory, no thread, refused by the backend) is a failure of this
        member.
        """
        error = error.with_traceback(None)  # a traceback keeps tensors alive
        detail = f"{operations[0].name}: {described(error)}"
        with self._lock:
            self._pending.difference_update(operations)
            self._copying_back.difference_update(operations)
            known = self.state.ended and not self._draining
            if not known:
                self._failed += operations
        if known:
            self._resolve(operations)
        elif isinstance(error, ConnectionLostError):
            self.report(Cause.TRANSPORT, error.peer, detail)
        else:
            self.report(Cause.LOCAL, self.rank, detail)

    def _on_timeout(self, operation: Operation) -> None:
        """The caller's timeout has expired."""
        if operation in self._pending or operation in self._copying_back:
            detail = f"{operation.name} took longer than {operation.timeout_s:g} s"
            self.fail(Cause.TIMEOUT, operation.peer, detail)

    def _on_cancelled(self, operation: Operation) -> WorldError | None:
        """The caller was cancelled, or its event loop shuts down: break the world. Returns the error that the world ended with.

        The caller may change the tensors afterwards, so nothing more is sent.
        """
        self.fail(Cause.ABORTED, self.rank, f"{operation.name} cancelled")
        with self._lock:
            self._close_connections()
        return self.ending()

    def _resolve(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            operation.resolve(self.ending())

    # -- ending --------------------------------------------------------------------------------------------------------------

    def report(self, cause: Cause, rank: int, detail: str) -> None:
        """Break the world soon, not on this thread. After a lost connection (TRANSPORT) the control connection may know a better cause."""
        if cause is Cause.TRANSPORT:
            due_s = time.monotonic() + _CAUSE_GRACE_S
            self._control_loop.call_soon(self._break_unless_cause_arrives, rank, detail, due_s)
        else:
            self._control_loop.call_soon(self.fail, cause, rank, detail)

    def ending(self) -> WorldError | None:
        """Return a new error for operations to raise; None while the world has not ended.

        New each time, because an exception that is raised in several places collects all their tracebacks.
        """
        if self.state is WorldState.CLOSED:
            return WorldClosedError(self.name, "closed by this process")
        if self.state is WorldState.BROKEN:
            assert self.failure is not None
            return BrokenWorldException(*self.failure.args)
        return None

    def _break_unless_cause_arrives(self, peer: int, detail: str, due_s: float) -> None:
        """After a data connection failed, wait for the control connection to report the cause; otherwise break with TRANSPORT.

        While the heartbeats of a member are late, the wait is up to `heartbeat_timeout_s` longer, because the member may be unresponsive.
        """
        if self.state is not WorldState.READY:
            return
        heartbeat, now_s = self._config.heartbeat, time.monotonic()
        late = math.isfinite(heartbeat.timeout_s) and self.silence_s() > 1.5 * heartbeat.interval_s
        if now_s < due_s + (heartbeat.timeout_s if late else 0.0):
            self._control_loop.loop.call_later(
                _CAUSE_GRACE_S / 4, self._break_unless_cause_arrives, peer, detail, due_s
            )
        else:
            self.fail(Cause.TRANSPORT, peer, detail)

    def silence_s(self) -> float:
        """For how many seconds no heartbeat or other control data has arrived from a member, at most: an early sign that it is frozen."""
        return 0.0 if self._forming.monitor is None else self._forming.monitor.silence_s()

    def fail(self, cause: Cause, rank: int, detail: str = "") -> None:
        """End this world because a member failed or left. Idempotent, callable from any thread; the first cause is kept."""
        with self._state_lock:
            if self.state.ended:
                return
            formed = self.state is WorldState.READY
            self.failure = BrokenWorldException(self.name, cause, rank, detail)
            self._draining = cause is Cause.LEFT  # first, so that no operation fails in between
            self._enter(WorldState.BROKEN)
            self.undetected_s = self._forming.monitor.detected_after_s if self._forming.monitor is not None else None
        if formed:
            logger.log(
                logging.DEBUG if cause in (Cause.LEFT, Cause.ABORTED) else logging.WARNING,  # on purpose
                "world=%s generation=%d rank=%d ready->broken cause=%s by=%d %s",
                *(self.name, self.generation, self.rank, cause, rank, detail),
            )
        self._on_ended(cause, rank, detail, report=formed)

    def close(self) -> None:
        """Leave and end this world. Idempotent. Pending operations raise WorldClosedError. `reclaimed` is set when everything is freed."""
        with self._state_lock:
            if self.state.ended:
                return
            formed = self.state is WorldState.READY
            self._enter(WorldState.CLOSED)
        logger.debug("world=%s generation=%d rank=%d ->closed", self.name, self.generation, self.rank)
        self._on_ended(Cause.LEFT if formed else Cause.ABORTED, self.rank, "", report=True)

    def _enter(self, state: WorldState) -> None:
        """Change the state. Call it under the state's lock."""
        assert state in TRANSITIONS[self.state]
        self.state = state

    def _on_ended(self, cause: Cause, rank: int, detail: str, *, report: bool) -> None:
        self._control_loop.call_soon(self._forming.cancel)
        self._control_loop.call_soon(self._announce_end, cause, rank, detail)
        if report:
            self._on_changed(self)
        # Not a `DaemonThread`: its start may block for seconds, and the caller may be the control loop of all worlds.
        # RuntimeError: too many threads, or the interpreter shuts down (Python 3.12 and newer).
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(self._teardown, (_LEAVE_S, _JOIN_S))
        self._control_loop.call_soon(self._control_loop.loop.call_later, _TEARDOWN_THREAD_S, self._teardown, 0.0, 0.0)

    def _announce_end(self, cause: Cause, rank: int, detail: str) -> None:
        """Announce the end to the other members, and free the name for the next generation. Runs on the control loop's thread."""
        monitor = self._forming.monitor
        if monitor is not None and self.acceptor is not None:
            self.acceptor.remove(monitor)
        if monitor is None or not monitor.started:
            return
        if cause is not Cause.LEFT:
            monitor.announce_failure(rank, cause, detail)
        elif self.state is WorldState.CLOSED:
            monitor.leave()

    # -- teardown (on the thread that tears the world down) -------------------------------------------------------------------------

    def _teardown(self, leave_s: float, join_s: float) -> None:
        """Free everything, on a thread, because aborting NCCL may hang. Without a thread, on the control loop, and without waiting."""
        if not self._teardown_claim.acquire(blocking=False):
            return
        try:
            left = self._draining
            if left:
                self._drain(min(leave_s, _DRAIN_S))
            if left or self.state is WorldState.CLOSED:
                self._leave(leave_s)
            with self._lock:
                self._draining = False
                nccl, self.nccl = self.nccl, None
                self._close_connections()
            self._fail_pending()
            aborted = nccl is None or nccl.abort(self.ending() or JoinError(self.name, "ended"), join_s)
            if not (self._copying.close(join_s) and aborted):
                logger.error("world=%s generation=%d: threads are still blocked", self.name, self.generation)
        finally:  # also when something could not be freed
            with self._lock:
                self._close_connections()
                self._pending |= self._copying_back
            self._fail_pending()
            self._control_loop.call_soon(self._finish_teardown)

    def _finish_teardown(self) -> None:
        self._forming.finish()
        self.reclaimed.set()

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
            self._draining = False
            operations, self._failed, self._pending = [*self._failed, *self._pending], [], set()
        self._resolve(operations)

    def _close_connections(self) -> None:
        connections, self._connections = self._connections, {}  # an ended world may be kept by name: free the buffers
        for connection in connections.values():
            connection.close()
