"""One world: its state, its members and its end. Its operations are in pending.py.

`TRANSITIONS` is the table of its states. Only `fail` makes a world `broken`; the thread that first detects the failure calls it. A teardown
thread then aborts the group, fails the pending operations, and frees threads, sockets and memory. The lock of the state is held for
microseconds, because the control loop takes it.
"""

import _thread
import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from functools import partial

import torch
from torch import Tensor

from multiworld.collectives.nccl import NcclCollectives, connect_nccl_group, make_nccl_group
from multiworld.config import WorldConfig
from multiworld.control.loop import ControlLoop
from multiworld.errors import BrokenWorldException, Cause, WorldClosedError, WorldError
from multiworld.execution.store import ControlStore
from multiworld.membership.acceptor import Acceptor
from multiworld.membership.forming import Forming
from multiworld.ops import p2p
from multiworld.ops.operation import Message, Operation, View
from multiworld.ops.validation import WorldFacts
from multiworld.pending import PendingOperations

logger = logging.getLogger(__name__)

_CAUSE_GRACE_S = 0.5
"""When a data connection fails first, wait this long for the control connection to report the cause."""
_WATCH_S = 1.0
"""Interval at which the data connections are checked."""
_LEAVE_S = 1.0
"""After one has left, how long each member waits until the others have closed their data connections."""
_TEARDOWN_THREAD_S = 0.5
"""After this time the teardown thread of an ended world counts as not started."""
_JOIN_S = 5.0
"""How long to wait for the threads of an ended world."""


class Transport(StrEnum):
    """Tells how two members of a world exchange data."""

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
        self._teardown_claim = threading.Lock()  # acquired by the first of the two callers
        self._forming = Forming(self, config, control_loop, acceptor)
        self._operations = PendingOperations(self, config)
        self.nccl = self._make_nccl(config.device) if config.device is not None else None

    def __repr__(self) -> str:
        return f"<World {self.name!r} generation={self.generation} rank={self.rank}/{self.size} {self.state}>"

    def _make_nccl(self, device: torch.device) -> NcclCollectives:
        logger.warning("world=%s uses NCCL, which is experimental: see docs/gpu.md", self.name)
        store = ControlStore(partial(self._control_loop.call_soon, self._forming.publish), self._config.timeout_s)
        operations = self._operations
        make_group = partial(make_nccl_group, store, self.rank, self.size)
        connect_group = partial(connect_nccl_group, device, operations.check)
        outcomes = operations.check, operations.on_transferred, operations.fail
        return NcclCollectives(self.name, store, make_group, connect_group, *outcomes)

    async def open(self) -> None:
        """Join the other members and build the group.

        Raises:
            JoinError: the world did not form within `timeout_s`, or rank 0 refused us.
            BrokenWorldException: a member was lost while the world formed.
            WorldClosedError: `close` was called in the meantime.
        After an error the caller must `close` the world, which frees it. Cancelling breaks it.
        """
        self._operations.use_loop()
        await self._forming.run()

    # -- calls of `Forming` (see `FormingWorld`) ---------------------------------------------------------------------------------

    def on_formed(self, socks: dict[int, socket.socket]) -> None:
        with self._state_lock:
            if error := self.ending():
                raise error
            self._operations.connect(socks)
            if socks and all(sock.family == socket.AF_UNIX for sock in socks.values()):
                self.transport = Transport.SHARED_MEMORY
            self._enter(WorldState.READY)
            self._on_changed(self)  # under the lock, so that READY is reported before the end
        if self.transport is Transport.TCP:
            self._control_loop.call_soon(self._watch_connections)

    def _watch_connections(self) -> None:
        """Break the world if a network drops the data while the heartbeats arrive. Runs on the control loop's thread, takes no lock."""
        if self.state is WorldState.READY:
            for peer in self._operations.unacknowledged():
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
        check: Callable[[bytes, int], object],
        src: int,
        *,
        tag: int = 0,
        timeout_s: float | None = None,
    ) -> View:
        """Receive a message of unknown size without a copy, if the sender has allocated its payload with `allocate` on this host.

        Otherwise the view has memory of its own. `check(header, size_bytes)` raises ValueError to refuse the message: the world breaks
        with cause `error`. It must not block, and may be called on another thread.
        """
        view = View(check)
        await self.start(p2p.recv_view(self.facts, view, src, tag), timeout_s=timeout_s).finish()
        return view

    def start(self, operation: Operation, *, timeout_s: float | None = None) -> Operation:
        """Start an operation on the running event loop. Does not block. See multiworld/ops/p2p.py and collectives.

        Errors while starting fail the returned operation and break the world. `timeout_s` breaks the world when the operation is still
        pending after so many seconds; None means no limit.
        Raises WorldError when the world has ended or is still joining.
        """
        if self.state is WorldState.JOINING:
            raise WorldError(self.name, "still joining: await its initialisation before using it")
        return self._operations.start(operation, timeout_s)

    def start_on_thread(self, operation: Message, timeout_s: float | None) -> Callable[[float | None], None]:
        """Start a send or receive on a thread without an event loop. Returns what waits at most so many seconds for its `outcome`.

        The world's event loop completes it if no thread waits. Otherwise like `start`.
        """
        return self._operations.start_on_thread(operation, timeout_s)

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
            self._operations.draining = cause is Cause.LEFT  # first, so that no operation fails in between
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

    def _teardown(self, leave_s: float, join_s: float) -> None:
        """Free everything, on a thread, because aborting NCCL may hang. Without a thread, on the control loop, and without waiting."""
        if not self._teardown_claim.acquire(blocking=False):
            return
        try:
            leaving = self.state is WorldState.CLOSED
            if not self._operations.end(leaving=leaving, leave_s=leave_s, join_s=join_s):
                logger.error("world=%s generation=%d: threads are still blocked", self.name, self.generation)
        finally:
            self._control_loop.call_soon(self._finish_teardown)

    def _finish_teardown(self) -> None:
        self._forming.finish()
        self.reclaimed.set()
