"""One world: a process group, its store, its watch and its state.

    joining ──▶ ready ──▶ broken     a member failed
       │          └─────▶ closed     we said goodbye
       └──▶ broken | closed          it never formed

A world never heals. `break_` is the only way into `broken`, from whatever thread sees the failure first; a thread of its own then
aborts the group, wakes everybody who waits, and frees threads, sockets and memory.
"""

import _thread
import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from multiworld import messages
from multiworld.arguments import Ranks
from multiworld.board import Board, board_of
from multiworld.errors import BrokenWorldException, Cause, JoinError, WorldClosedError, WorldError
from multiworld.forming import AnyWatch, Forming
from multiworld.operation import Operation, Plan
from multiworld.process_group import abort_process_group
from multiworld.reception import Reception
from multiworld.rendezvous import Roster, Watch
from multiworld.store import LifelineStore
from multiworld.traffic import Traffic
from multiworld.watchdog import WatchDog
from multiworld.world_config import WorldConfig

logger = logging.getLogger(__name__)

_VERDICT_GRACE_S = 0.5
"""When the group's connections fail first, the lifeline has this long to say what really happened."""
_DRAIN_S = 0.2
"""When a member leaves, operations pending elsewhere have this long to complete."""
_LINGER_S = 1.0
"""How long a leaving member waits for the others to have drained."""
_READ_S = 0.02
"""How often what comes meanwhile is read, for an event loop that stands still."""
_RECLAIM_RETRY_S = 0.1
_RECLAIM_S = 5.0
"""How long the waiting threads of an ended world may take to come back before we say that they hang."""


class WorldState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    BROKEN = "broken"
    CLOSED = "closed"


class WorldListener(Protocol):
    """Who is told of a world's changes. Called from any thread; must return at once."""

    def on_world_changed(self, world: "World") -> None: ...


class World:
    """One member's end of one world. Made by `WorldManager`; its operations may be awaited on any event loop."""

    def __init__(
        self, config: WorldConfig, watchdog: WatchDog, reception: Reception | None, listener: WorldListener
    ) -> None:
        self.name = config.name
        self.rank = config.rank
        self.size = config.size
        self.epoch = config.epoch
        self.state = WorldState.JOINING
        self.failure: BrokenWorldException | None = None
        self.silent_s: float | None = None
        """How long the failed member had been silent when the world broke, where its silence or end was what broke it."""
        self.reclaimed = threading.Event()
        """Set when nothing of an ended world is left: no thread, no socket, no group."""
        self._config = config
        self._watchdog = watchdog
        self._reception = reception
        self._listener = listener
        self._lock = threading.RLock()
        self._watch: Watch | None = None
        self._store = LifelineStore(lambda key, value: watchdog.call_soon(self._put, key, value), config.timeout_s)
        self.ranks = Ranks(config.name, config.rank, config.size, config.backends)
        self._traffic = Traffic(self, self._lock, checked=config.checked)
        self._settled = threading.Event()
        self.forming = Forming(self, config, watchdog, reception, self._store)
        self._board: Board | None = None

    def __repr__(self) -> str:
        return f"<World {self.name!r} epoch={self.epoch} rank={self.rank}/{self.size} {self.state}>"

    async def open(self) -> None:
        """Meet the other members and build the group.

        Raises:
            JoinError: it did not form within `timeout_s`, or the host refused us.
            BrokenWorldException: a member was lost while it formed.
            WorldClosedError: it was closed meanwhile.
        The world is ended then, and leaves nothing behind. Cancelling ends it too.
        """
        self._board = board_of(asyncio.get_running_loop())
        await self.forming.run()

    # -- what its forming says (see `FormingWorld`) ----------------------------------------------------------------------------

    def be_watched(self, make_watch: Callable[[], AnyWatch]) -> AnyWatch | None:
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
            self._listener.on_world_changed(self)  # under the lock: nobody is to hear of its end before

    # -- what the watch says (on the watchdog's thread) ------------------------------------------------------------------------

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
        """Send `tensor` to rank `dst`. Completes when the receiver has posted its receive and the kernel has the data."""
        await self.start_send(tensor, dst, tag=tag, timeout_s=timeout_s).finish()

    async def recv(self, tensor: Tensor, src: int, *, tag: int = 0, timeout_s: float | None = None) -> None:
        """Receive into `tensor`, in place, what rank `src` sends. Size and dtype must be the sender's."""
        await self.start_recv(tensor, src, tag=tag, timeout_s=timeout_s).finish()

    def start_send(self, tensor: Tensor, dst: int, *, tag: int = 0, timeout_s: float | None = None) -> Operation:
        """Post the send and return at once; await what it gives."""
        return self._traffic.start(messages.send(self.ranks, tensor, dst, tag), timeout_s)

    def start_recv(self, tensor: Tensor, src: int, *, tag: int = 0, timeout_s: float | None = None) -> Operation:
        """Post the receive and return at once; await what it gives."""
        return self._traffic.start(messages.recv(self.ranks, tensor, src, tag), timeout_s)

    def start(self, plan: Plan, *, timeout_s: float | None = None) -> Operation:
        """Post an operation that `messages`, `collectives` or `reductions` planned, and return at once."""
        return self._traffic.start(plan, timeout_s)

    async def finish(self, operation: Operation) -> None:
        """Await a started operation."""
        await operation.finish()

    def on_connection_failed(self, peer: int, detail: str) -> None:
        self._watchdog.call_soon(self._await_verdict, peer, detail, time.monotonic() + _VERDICT_GRACE_S)

    def on_line_nonsense(self, peer: int, detail: str) -> None:
        self._watchdog.call_soon(self.break_, Cause.ERROR, peer, detail)

    def on_drained(self) -> None:
        self._watchdog.call_soon(self._settle_when_drained)

    def ending(self) -> WorldError | None:
        """What operations raise from now on; None while the world lives.

        A fresh error each time: an exception that is raised in several places gathers all their tracebacks.
        """
        if self.state is WorldState.CLOSED:
            return WorldClosedError(self.name, "closed by this process")
        if self.state is WorldState.BROKEN:
            assert self.failure is not None
            return BrokenWorldException(*self.failure.args)
        return None

    def _await_verdict(self, peer: int, detail: str, due_s: float) -> None:
        """The connection failed; the lifeline knows best why. While some member is overdue, whether it hangs is still open."""
        if self.state is not WorldState.READY or self._watch is None:
            return
        pulse = self._config.pulse
        overdue = self._watch.silence_s() > 1.5 * pulse.interval_s
        if time.monotonic() < due_s or overdue:
            self._watchdog.call_later(_VERDICT_GRACE_S / 4, self._await_verdict, peer, detail, due_s)
        else:
            self.break_(Cause.TRANSPORT, peer, detail)

    # -- ending --------------------------------------------------------------------------------------------------------------

    def break_(self, cause: Cause, rank: int, detail: str = "") -> None:
        """A member failed, or left: end this world. Idempotent, from any thread; the first cause stands."""
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
        """Say goodbye and end this world. Idempotent; what is pending raises WorldClosedError. `reclaimed` tells when all is freed."""
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
        """Tell the others (on the watchdog's thread), and free the name for the next epoch."""
        watch = self._watch
        if isinstance(watch, Roster) and self._reception is not None:
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
        # Not `threading.Thread`: its `start` waits, for ever, for a thread that dies of a lack of memory before it has begun,
        # and who waits here may be the watchdog of every world of this process.
        try:
            _thread.start_new_thread(self._reclaim, ())
        except RuntimeError:  # there are too many, or the interpreter is ending (Python 3.12 and newer)
            if self._watchdog.is_current_thread:  # it must not wait, and others may end meanwhile
                self._watchdog.call_later(_RECLAIM_RETRY_S, self._start_reclaim)
            else:
                self._reclaim()

    def _reclaim(self) -> None:
        """Free everything, on a thread of its own: aborting takes milliseconds for Gloo, and may hang for NCCL."""
        if self._traffic.draining or not self._traffic.busy:
            self._linger()
        self._store.abort(self.ending() or JoinError(self.name, "ended"))
        self.forming.end()
        group = self._traffic.take_group()
        if group is not None:
            abort_process_group(group, self.rank, self.size, self._config.backends)
            del group
        if not self._traffic.end(_RECLAIM_S):
            logger.error("world=%s: operations did not come back %.0f s after the abort", self.name, _RECLAIM_S)
        self.forming.join_builder()
        self._watchdog.call_soon(self._detach)

    def _linger(self) -> None:
        """Wait until all have drained; what comes is read here as well, for the event loop may stand still."""
        until_s = time.monotonic() + _LINGER_S
        while not self._settled.wait(_READ_S) and time.monotonic() < until_s:
            self._traffic.read()

    def _detach(self) -> None:
        self.forming.forget()
        if self._watch is not None:
            self._watch.detach()
            self._watch = None
        self.reclaimed.set()
