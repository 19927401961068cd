"""One world: a process group with its store, monitor, operations and state.

    joining ──▶ ready ──▶ broken     a member failed or left
       │          └─────▶ closed     this process closed it
       └──▶ broken | closed          it never formed

An ended world stays ended. `break_` is the only transition to `broken`; the thread that first sees the failure calls it. A teardown thread
then aborts the group, fails the pending operations, and frees threads, sockets and memory.
"""

import _thread
import asyncio
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from multiworld.config import WorldConfig
from multiworld.control.loop import Timer, WatchDog
from multiworld.errors import BrokenWorldException, Cause, JoinError, WorldClosedError, WorldError
from multiworld.execution.process_group import abort_process_group
from multiworld.executor import OperationExecutor
from multiworld.membership.acceptor import Acceptor
from multiworld.membership.bootstrap import AnyMonitor, Bootstrap
from multiworld.membership.monitor import HostSession, MembershipMonitor
from multiworld.membership.store import ControlStore
from multiworld.ops import p2p as messages
from multiworld.ops.messages import recv_message, send_message
from multiworld.ops.operation import Operation, Plan
from multiworld.ops.validation import Ranks
from multiworld.transport.poller import Poller, poller_of

logger = logging.getLogger(__name__)

_VERDICT_GRACE_S = 0.5
"""When a data connection fails first, wait this long for the control connection to report the cause."""
_DRAIN_S = 0.2
"""When a member leaves, pending operations of the other members have this long to complete."""
_LINGER_S = 1.0
"""How long a member waits until all members have drained, after one has left."""
_READ_S = 0.02
"""Interval at which the teardown thread reads the data connections in the meantime, because the event loop may be blocked."""
_RECLAIM_RETRY_S = 0.1
_JOIN_S = 5.0
"""How long to wait for the threads of an ended world."""
_RECLAIM_S = 8.0
"""After this time the teardown thread of an ended world counts as lost, because c10d may block for ever."""


class WorldState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    BROKEN = "broken"
    CLOSED = "closed"


class WorldListener(Protocol):
    """Receives the state changes of a world. Called from any thread; must not block."""

    def on_world_changed(self, world: "World") -> None: ...


class World:
    """One member's side of one world. Created by `WorldManager`. Its operations may be awaited on any event loop.

    Attributes:
        name, rank, size, epoch: as given to `WorldManager.initialize_world`; an `epoch` of 0 is replaced when all ranks have joined.
        state: see the module docstring.
        failure: why the world broke; None unless `state` is BROKEN.
    """

    def __init__(
        self, config: WorldConfig, watchdog: WatchDog, reception: Acceptor | None, listener: WorldListener
    ) -> None:
        self.name = config.name
        self.rank = config.rank
        self.size = config.size
        self.epoch = config.epoch
        self.state = WorldState.JOINING
        self.failure: BrokenWorldException | None = None
        self.silent_s: float | None = None
        """Seconds for which the failed member had sent nothing when the world broke, or its event loop had not run (cause STALLED).
        None if no control connection was lost."""
        self.reclaimed = threading.Event()
        """Set when all threads, sockets and the group of an ended world are freed, except the threads that `threads_lost` reports."""
        self.threads_lost = False
        """Whether threads of this ended world did not return from c10d in time. They and what they reference are not freed."""
        self._config = config
        self._watchdog = watchdog
        self._reception = reception
        self._listener = listener
        self._lock = threading.RLock()
        self._watch: MembershipMonitor | None = None
        self._store = ControlStore(lambda key, value: watchdog.call_soon(self._put, key, value), config.timeout_s)
        self.ranks = Ranks(config.name, config.rank, config.size, config.backends, config.device)
        self._traffic = OperationExecutor(self, self._lock, checked=config.checked)
        self._settled = threading.Event()
        self._reclaiming = False
        self._threadless = False  # the teardown thread could not be started
        self._deadline: Timer | None = None
        self.forming = Bootstrap(self, config, watchdog, reception, self._store)
        self._board: Poller | None = None

    def __repr__(self) -> str:
        return f"<World {self.name!r} epoch={self.epoch} rank={self.rank}/{self.size} {self.state}>"

    async def open(self) -> None:
        """Join the other members and build the group.

        Raises:
            JoinError: the world did not form within `timeout_s`, or rank 0 refused us.
            BrokenWorldException: a member was lost while the world formed.
            WorldClosedError: `close` was called in the meantime.
        After an error the caller must `close` the world, which frees it. Cancelling breaks it.
        """
        self._board = poller_of(asyncio.get_running_loop())
        await self.forming.run()

    # -- calls of the bootstrap (see `BootstrapWorld`) ---------------------------------------------------------------------------

    def be_watched(self, make_watch: Callable[[], AnyMonitor]) -> AnyMonitor | None:
        with self._lock:
            if self.state is not WorldState.JOINING:
                return None
            self._watch = watch = make_watch()
            return watch

    def adopt(self, group: ProcessGroup, take_socks: Callable[[], dict[int, socket.socket]]) -> None:
        with self._lock:
            if error := self.ending():
                raise error
            assert self._board is not None
            self._traffic.open(group, take_socks(), self._board)
            self.state = WorldState.READY
            self._listener.on_world_changed(self)  # under the lock, so that READY is reported before the end

    # -- events of the monitor (on the control loop's thread) ------------------------------------------------------------------

    def on_all_here(self, epoch: int, local_host: str) -> None:
        self.epoch = epoch
        host = self._watch.lifelines[0].peer_host if self.rank > 0 and self._watch is not None else None
        self.forming.on_all_here(host, local_host)

    def on_stored(self, key: str, value: bytes) -> None:
        self._store.receive(key, value)

    def on_gone(self, rank: int, cause: Cause, detail: str) -> None:
        self.break_(cause, rank, detail)

    def on_left(self, rank: int) -> None:
        if self.state is WorldState.READY:
            self.break_(Cause.LEFT, rank)
        elif self.state is WorldState.JOINING:
            self.break_(Cause.LEFT, rank, "left while the world formed")
        else:
            self._watchdog.call_soon(self._settle_when_drained)

    def on_all_settled(self) -> None:
        self._settled.set()

    def on_refused(self, reason: str, *, final: bool) -> None:
        self.forming.on_refused(reason, final=final)

    def _put(self, key: str, value: bytes) -> None:
        if self._watch is not None:
            self._watch.put(key, value)

    # -- operations ----------------------------------------------------------------------------------------------------------

    async def send(self, tensor: Tensor, dst: int, *, tag: int = 0, timeout_s: float | None = None) -> None:
        """Send `tensor` to rank `dst`. Completes when the receiver has started its receive and the kernel has taken the data."""
        await self.start_send(tensor, dst, tag=tag, timeout_s=timeout_s).finish()

    async def recv(self, tensor: Tensor, src: int, *, tag: int = 0, timeout_s: float | None = None) -> None:
        """Receive from rank `src` into `tensor`, in place. Element count and dtype must equal the sender's."""
        await self.start_recv(tensor, src, tag=tag, timeout_s=timeout_s).finish()

    def start_send(self, tensor: Tensor, dst: int, *, tag: int = 0, timeout_s: float | None = None) -> Operation:
        """Start a send and return at once. Await the returned operation."""
        return self._traffic.start(messages.send(self.ranks, tensor, dst, tag), timeout_s)

    def start_recv(self, tensor: Tensor, src: int, *, tag: int = 0, timeout_s: float | None = None) -> Operation:
        """Start a receive and return at once. Await the returned operation."""
        return self._traffic.start(messages.recv(self.ranks, tensor, src, tag), timeout_s)

    def start_send_message(
        self, header: bytes, payload: Tensor | None, dst: int, *, tag: int = 0, timeout_s: float | None = None
    ) -> Operation:
        """Start a send of a message for `recv_message` and return at once. `header` has at most 48 bytes."""
        return self._traffic.start(send_message(self.ranks, header, payload, dst, tag), timeout_s)

    async def recv_message(
        self, accept: Callable[[bytes, int], Tensor], src: int, *, tag: int = 0, timeout_s: float | None = None
    ) -> None:
        """Receive a message of unknown size: `accept(header, size_bytes)` returns the tensor for its payload.

        If `accept` raises ValueError, the world breaks with cause `error`; see multiworld/ops/messages.py.
        """
        await self._traffic.start(recv_message(self.ranks, accept, src, tag), timeout_s).finish()

    def start(self, plan: Plan, *, timeout_s: float | None = None) -> Operation:
        """Start an operation from a plan (multiworld/ops/p2p.py, multiworld/collectives) and return at once."""
        return self._traffic.start(plan, timeout_s)

    async def finish(self, operation: Operation) -> None:
        """Await a started operation."""
        await operation.finish()

    def on_connection_failed(self, peer: int, detail: str) -> None:
        self._watchdog.call_soon(self._await_verdict, peer, detail, time.monotonic() + _VERDICT_GRACE_S)

    def on_line_nonsense(self, peer: int, detail: str) -> None:
        self._watchdog.call_soon(self.break_, Cause.ERROR, peer, detail)

    def on_local_failure(self, detail: str) -> None:
        self._watchdog.call_soon(self.break_, Cause.LOCAL, self.rank, detail)

    def on_drained(self) -> None:
        self._watchdog.call_soon(self._settle_when_drained)

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

    def _await_verdict(self, peer: int, detail: str, due_s: float) -> None:
        """After a data connection failed, wait for the control connection to report the cause; otherwise break with TRANSPORT.

        While the heartbeats of a member are late, wait up to `heartbeat_timeout_s` longer, because the member may be hung. Without a
        heartbeat timeout there is no longer wait.
        """
        if self.state is not WorldState.READY or self._watch is None:
            return
        pulse = self._config.pulse
        judged_s = pulse.timeout_s if math.isfinite(pulse.timeout_s) else 0.0
        overdue = self._watch.silence_s() > 1.5 * pulse.interval_s
        if (now_s := time.monotonic()) < due_s or (overdue and now_s < due_s + judged_s):
            self._watchdog.call_later(_VERDICT_GRACE_S / 4, self._await_verdict, peer, detail, due_s)
        else:
            self.break_(Cause.TRANSPORT, peer, detail)

    # -- ending --------------------------------------------------------------------------------------------------------------

    def break_(self, cause: Cause, rank: int, detail: str = "") -> None:
        """End this world because a member failed or left. Idempotent, callable from any thread; the first cause is kept."""
        with self._lock:
            if self.state in (WorldState.BROKEN, WorldState.CLOSED):
                return
            formed = self.state is WorldState.READY
            self.failure = BrokenWorldException(self.name, cause, rank, detail)
            self.state = WorldState.BROKEN
            self.silent_s = self._watch.lost_after_s if self._watch is not None else None
            self._traffic.draining = cause is Cause.LEFT
        if formed:
            logger.log(
                logging.INFO if cause is Cause.LEFT else logging.WARNING,
                "world=%s epoch=%d rank=%d ready->broken cause=%s by=%d %s",
                self.name,
                self.epoch,
                self.rank,
                cause,
                rank,
                detail,
            )
        self.forming.wake(error=self.ending())
        self._watchdog.call_soon(self._part, cause, rank, detail)
        if formed:
            self._listener.on_world_changed(self)
        self._start_reclaim()

    def close(self) -> None:
        """Leave and end this world. Idempotent. Pending operations raise WorldClosedError. `reclaimed` is set when everything is freed."""
        with self._lock:
            if self.state in (WorldState.BROKEN, WorldState.CLOSED):
                return
            formed = self.state is WorldState.READY
            self.state = WorldState.CLOSED
        logger.info("world=%s epoch=%d rank=%d ->closed", self.name, self.epoch, self.rank)
        self.forming.wake(error=WorldClosedError(self.name, "closed while joining"))
        self._watchdog.call_soon(self._part, Cause.LEFT if formed else Cause.ABORTED, self.rank, "")
        self._listener.on_world_changed(self)
        self._start_reclaim()

    def _part(self, cause: Cause, rank: int, detail: str) -> None:
        """Announce the end to the other members, and free the name for the next generation. Runs on the control loop's thread."""
        watch = self._watch
        if isinstance(watch, HostSession) and self._reception is not None:
            self._reception.unhost(watch)
        if watch is None or not watch.started:
            self._settled.set()
        elif cause is not Cause.LEFT:
            watch.gone(rank, cause, detail)
            self._settled.set()
        elif self.state is WorldState.CLOSED:
            watch.leave()
            self._settle_when_drained()
        else:
            self._settle_when_drained()
            self._watchdog.call_later(_DRAIN_S, self._settled.set)

    def _settle_when_drained(self) -> None:
        if self._watch is not None and (not self._traffic.busy or self.state is WorldState.CLOSED):
            self._watch.settle()

    def _start_reclaim(self) -> None:
        # Not a `DaemonThread`: its start may block for seconds, and the caller may be the control loop of all worlds.
        try:
            _thread.start_new_thread(self._reclaim, ())
        except RuntimeError:  # too many threads, or the interpreter shuts down (Python 3.12 and newer)
            self._threadless = True
        self._watchdog.call_soon(self._watchdog.call_later, _RECLAIM_RETRY_S, self._check_reclaim)

    def _check_reclaim(self) -> None:
        """If no teardown thread has started, fail the pending operations here and retry. Runs on the control loop's thread."""
        if self._reclaiming:
            return
        if not self._traffic.draining or self._settled.is_set():
            self._traffic.answer_all()
        self._start_reclaim()

    def wait_until_reclaimed(self, timeout_s: float) -> None:
        """Wait until everything is freed. If no teardown thread could be started, free it on this thread."""
        until_s = time.monotonic() + timeout_s
        while not self.reclaimed.wait(_RECLAIM_RETRY_S):
            if self._threadless:
                self._reclaim()
            if time.monotonic() > until_s:
                return

    def _reclaim(self) -> None:
        with self._lock:
            if self._reclaiming:
                return
            self._reclaiming = True
        try:
            self._free()
        finally:  # also when something could not be freed
            self._traffic.answer_all()

    def _free(self) -> None:
        """Free everything, on the teardown thread: aborting Gloo takes milliseconds, and aborting NCCL may hang."""
        if self._traffic.draining or not self._traffic.busy:
            self._linger()
        self._watchdog.call_soon(self._limit_reclaiming)
        group = self._traffic.end()
        self._store.abort(self.ending() or JoinError(self.name, "ended"))
        self.forming.end()
        if group is not None:
            abort_process_group(group, self.rank, self.size, self._config.backends)
            del group
        if not self._traffic.join(_JOIN_S):
            self._lose_threads()
        self.forming.join_builder()
        self._watchdog.call_soon(self._detach)

    def _limit_reclaiming(self) -> None:
        self._deadline = self._watchdog.call_later(_RECLAIM_S, self._give_up_reclaiming)

    def _give_up_reclaiming(self) -> None:
        self._lose_threads()
        self._detach()

    def _lose_threads(self) -> None:
        self.threads_lost = True
        logger.error(
            "world=%s epoch=%d: threads did not come back from c10d; they are left behind", self.name, self.epoch
        )

    def _linger(self) -> None:
        """Wait until all members have drained. Also read the data connections here, because the event loop may be blocked."""
        until_s = time.monotonic() + _LINGER_S
        while not self._settled.wait(_READ_S) and time.monotonic() < until_s:
            self._traffic.read()

    def _detach(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.forming.forget()
        if self._watch is not None:
            self._watch.detach()
            self._watch = None
        self.reclaimed.set()
