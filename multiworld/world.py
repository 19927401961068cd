"""One world: a process group with its store, monitor, operations and state.

    joining ──▶ ready ──▶ broken     a member failed or left
       │          └─────▶ closed     this process closed it
       └──▶ broken | closed          it never formed

A world never leaves `broken` or `closed`. Only `fail` makes it `broken`; the thread that first detects the failure calls it. A teardown
thread then aborts the group, fails the pending operations, and frees threads, sockets and memory.
"""

import _thread
import asyncio
import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from multiworld.config import WorldConfig
from multiworld.control.loop import ControlLoop
from multiworld.errors import BrokenWorldException, Cause, JoinError, WorldClosedError, WorldError
from multiworld.execution.process_group import abort_nccl_group
from multiworld.membership.acceptor import Acceptor
from multiworld.membership.forming import Forming
from multiworld.operations import Transport, WorldOperations
from multiworld.ops import p2p
from multiworld.ops.operation import Operation, Plan
from multiworld.ops.validation import Ranks
from multiworld.ops.views import View
from multiworld.transport.poller import Poller, poller_of

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


class WorldState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    BROKEN = "broken"
    CLOSED = "closed"

    @property
    def ended(self) -> bool:
        return self in (WorldState.BROKEN, WorldState.CLOSED)


class WorldListener(Protocol):
    """Receives the state changes of a world. Called from any thread; must not block."""

    def on_world_changed(self, world: "World") -> None: ...


class World:
    """One member's side of one world. Created by `WorldManager`. Its operations may be awaited on any event loop.

    Attributes:
        name, rank, size: as given to `WorldManager.initialize_world`.
        generation: the number of this world among those of its name; 0 until all ranks have joined, unless the caller chose one.
        state: see the module docstring.
        failure: why the world broke; None unless `state` is BROKEN.
    """

    def __init__(
        self, config: WorldConfig, control_loop: ControlLoop, acceptor: Acceptor | None, listener: WorldListener
    ) -> None:
        self.name = config.name
        self.rank = config.rank
        self.size = config.size
        self.generation = config.generation
        self.state = WorldState.JOINING
        self.failure: BrokenWorldException | None = None
        self.silent_s: float | None = None
        """Seconds without data from the failed member when the world broke, or without a run of its event loop (cause STALLED). None if
        no control connection was lost."""
        self.reclaimed = threading.Event()
        """Set when all threads, sockets and the group of an ended world are freed, except the threads that `threads_lost` reports."""
        self.threads_lost = False
        """Whether threads of this ended world did not return from c10d in time. They and what they reference are not freed."""
        self.ranks: Ranks = config
        self._config = config
        self._control_loop = control_loop
        self.acceptor = acceptor
        self._listener = listener
        self._lock = threading.RLock()  # guards the state; held for microseconds, because the control loop takes it
        self._operations = WorldOperations(self, verify_collectives=config.verify_collectives)
        self._teardown_started = False
        self._forming = Forming(self, config, control_loop, acceptor)
        self._poller: Poller | None = None

    def __repr__(self) -> str:
        return f"<World {self.name!r} generation={self.generation} rank={self.rank}/{self.size} {self.state}>"

    @property
    def transports(self) -> dict[int, Transport]:
        """How this member is connected to each of the others, by rank. Empty until the world is ready, and with NCCL only."""
        return self._operations.transports

    @property
    def transport(self) -> Transport:
        """`SHARED_MEMORY` if this member is connected so to all others, else `TCP`."""
        return Transport.SHARED_MEMORY if {*self.transports.values()} == {Transport.SHARED_MEMORY} else Transport.TCP

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `WorldManager.allocate`."""
        return self._config.segments.allocate(shape, dtype)

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

    def on_formed(self, group: ProcessGroup | None, socks: dict[int, socket.socket]) -> None:
        with self._lock:
            if error := self.ending():
                raise error
            assert self._poller is not None
            self._operations.open(group, socks, self._poller, self._config.segments)
            self.state = WorldState.READY
            self._listener.on_world_changed(self)  # under the lock, so that READY is reported before the end
        if Transport.TCP in self.transports.values():
            self._control_loop.call_soon(self._watch_connections)

    def on_member_left(self, rank: int) -> None:
        if self.state is WorldState.READY:
            self.fail(Cause.LEFT, rank)
        elif self.state is WorldState.JOINING:
            self.fail(Cause.LEFT, rank, "left while the world formed")

    def _watch_connections(self) -> None:
        """Break the world if a network drops the data while the heartbeats arrive. Runs on the control loop's thread."""
        if self.state is WorldState.READY:
            for peer in self._operations.unacknowledged():
                self.report(Cause.TRANSPORT, peer, "the data sent to it is not acknowledged")
            self._control_loop.call_later(_WATCH_S, self._watch_connections)

    # -- operations ----------------------------------------------------------------------------------------------------------

    async def send(self, tensor: Tensor, dst: int, *, tag: int = 0, timeout_s: float | None = None) -> None:
        """Send `tensor` to rank `dst`. The tensor may be changed when it completes (see `WorldCommunicator.send`)."""
        await self.start_send(tensor, dst, tag=tag, timeout_s=timeout_s).finish()

    async def recv(self, tensor: Tensor, src: int, *, tag: int = 0, timeout_s: float | None = None) -> None:
        """Receive from rank `src` into `tensor`, in place. Element count and dtype must equal the sender's."""
        await self.start_recv(tensor, src, tag=tag, timeout_s=timeout_s).finish()

    def start_send(self, tensor: Tensor, dst: int, *, tag: int = 0, timeout_s: float | None = None) -> Operation:
        """Start a send and return at once. Await the returned operation."""
        return self._operations.start(p2p.send(self.ranks, tensor, dst, tag), timeout_s)

    def start_recv(self, tensor: Tensor, src: int, *, tag: int = 0, timeout_s: float | None = None) -> Operation:
        """Start a receive and return at once. Await the returned operation."""
        return self._operations.start(p2p.recv(self.ranks, tensor, src, tag), timeout_s)

    def start_send_message(
        self, header: bytes, payload: Tensor | None, dst: int, *, tag: int = 0, timeout_s: float | None = None
    ) -> Operation:
        """Start a send of a message for `recv_message` and return at once. `header` has at most 48 bytes.

        If the payload is of `allocate`, it must not be changed any more: the receiver may read it at any time.
        """
        return self._operations.start(p2p.send_message(self.ranks, header, payload, dst, tag), timeout_s)

    async def recv_message(
        self, accept: Callable[[bytes, int], Tensor], src: int, *, tag: int = 0, timeout_s: float | None = None
    ) -> None:
        """Receive a message of unknown size: `accept(header, size_bytes)` returns the tensor for its payload.

        If `accept` raises ValueError, the world breaks with cause `error`; see multiworld/ops/p2p.py.
        """
        await self._operations.start(p2p.recv_message(self.ranks, accept, src, tag), timeout_s).finish()

    async def recv_view(
        self,
        check: Callable[[bytes, int], object],
        src: int,
        *,
        tag: int = 0,
        timeout_s: float | None = None,
    ) -> View:
        """Receive a message of unknown size without a copy, if the sender has allocated its payload with `allocate` on this host.

        Otherwise the view has memory of its own. `check(header, size_bytes)` raises ValueError to refuse the message: the world breaks
        with cause `error`.
        """
        view = View(check)
        await self._operations.start(p2p.recv_view(self.ranks, view, src, tag), timeout_s).finish()
        return view

    def start(self, plan: Plan, *, timeout_s: float | None = None) -> Operation:
        """Start an operation from a plan (multiworld/ops/p2p.py, multiworld/collectives) and return at once."""
        return self._operations.start(plan, timeout_s)

    def report(self, cause: Cause, rank: int, detail: str) -> None:
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
        if self.state is not WorldState.READY or self._forming.monitor is None:
            return
        heartbeat, now_s = self._config.heartbeat, time.monotonic()
        late = math.isfinite(heartbeat.timeout_s) and self._forming.monitor.silence_s() > 1.5 * heartbeat.interval_s
        if now_s < due_s + (heartbeat.timeout_s if late else 0.0):
            self._control_loop.call_later(_CAUSE_GRACE_S / 4, self._break_unless_cause_arrives, peer, detail, due_s)
        else:
            self.fail(Cause.TRANSPORT, peer, detail)

    # -- ending --------------------------------------------------------------------------------------------------------------

    def fail(self, cause: Cause, rank: int, detail: str = "") -> None:
        """End this world because a member failed or left. Idempotent, callable from any thread; the first cause is kept."""
        with self._lock:
            if self.state.ended:
                return
            formed = self.state is WorldState.READY
            self.failure = BrokenWorldException(self.name, cause, rank, detail)
            self._operations.draining = cause is Cause.LEFT  # first, so that no operation fails in between
            self.state = WorldState.BROKEN
            self.silent_s = self._forming.monitor.detected_after_s if self._forming.monitor is not None else None
        if formed:
            logger.log(
                logging.DEBUG if cause in (Cause.LEFT, Cause.ABORTED) else logging.WARNING,  # on purpose
                "world=%s generation=%d rank=%d ready->broken cause=%s by=%d %s",
                *(self.name, self.generation, self.rank, cause, rank, detail),
            )
        self._forming.wake()
        self._control_loop.call_soon(self._announce_end, cause, rank, detail)
        if formed:
            self._listener.on_world_changed(self)
        self._start_teardown()

    def close(self) -> None:
        """Leave and end this world. Idempotent. Pending operations raise WorldClosedError. `reclaimed` is set when everything is freed."""
        with self._lock:
            if self.state.ended:
                return
            formed = self.state is WorldState.READY
            self.state = WorldState.CLOSED
        logger.debug("world=%s generation=%d rank=%d ->closed", self.name, self.generation, self.rank)
        self._forming.wake()
        self._control_loop.call_soon(self._announce_end, Cause.LEFT if formed else Cause.ABORTED, self.rank, "")
        self._listener.on_world_changed(self)
        self._start_teardown()

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

    def _start_teardown(self) -> None:
        # Not a `DaemonThread`: its start may block for seconds, and the caller may be the control loop of all worlds.
        with contextlib.suppress(
            RuntimeError
        ):  # too many threads, or the interpreter shuts down (Python 3.12 and newer)
            _thread.start_new_thread(self._teardown, (_LEAVE_S, _JOIN_S))
        self._control_loop.call_soon(self._control_loop.call_later, _TEARDOWN_THREAD_S, self._teardown, 0.0, 0.0)

    def _teardown(self, leave_s: float, join_s: float) -> None:
        """Free everything, on a thread, because aborting NCCL may hang. Without a thread, on the control loop, and without waiting."""
        with self._lock:
            if self._teardown_started:
                return
            self._teardown_started = True
        try:
            left = self._operations.draining
            if left:
                self._operations.drain(min(leave_s, _DRAIN_S))
            if left or self.state is WorldState.CLOSED:
                self._operations.leave(leave_s)
            group = self._operations.end()
            self._forming.close(self.ending() or JoinError(self.name, "ended"), join_s)
            if group is not None:
                abort_nccl_group(group)
                del group
            self.threads_lost = not self._operations.join(join_s)
            if self.threads_lost:
                logger.error("world=%s generation=%d: threads are still blocked", self.name, self.generation)
        finally:  # also when something could not be freed
            self._operations.close()
            self._control_loop.call_soon(self._finish_teardown)

    def _finish_teardown(self) -> None:
        self._forming.finish()
        self.reclaimed.set()
