"""One world: a process group, its store, its watch and its state.

    joining ──▶ ready ──▶ broken     a member failed
       │          └─────▶ closed     we said goodbye
       └──▶ broken | closed          it never formed

A world never heals. `break_` is the only way into `broken`, from whatever thread sees the failure first; a thread of its own then
aborts the group, wakes everybody who waits, and frees threads, sockets and memory.
"""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, Store, Work

from multiworld.errors import BrokenWorldException, Cause, JoinError, WorldClosedError, WorldError
from multiworld.handshake import Hello
from multiworld.operation import Operation
from multiworld.process_group import abort_process_group, cause_of_failure, make_process_group
from multiworld.reception import Reception
from multiworld.rendezvous import Address, Membership, Pulse, Roster, Watch
from multiworld.store import LifelineStore
from multiworld.waiters import Waiters
from multiworld.watchdog import WatchDog

logger = logging.getLogger(__name__)

_VERDICT_GRACE_S = 0.1
"""When the group's connections fail first, the lifeline has this long to say what really happened."""
_DRAIN_S = 0.2
"""When a member leaves, operations pending elsewhere have this long to complete."""
_LINGER_S = 1.0
"""How long a leaving member waits for the others to have drained."""
_RECLAIM_S = 5.0
"""How long the waiting threads of an ended world may take to come back before we say that they hang."""
_RESOLVE_RETRY_S = 0.5


class WorldState(StrEnum):
    JOINING = "joining"
    READY = "ready"
    BROKEN = "broken"
    CLOSED = "closed"


class WorldListener(Protocol):
    """Who is told of a world's changes. Called from any thread; must return at once."""

    def on_world_changed(self, world: "World") -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """What a world is made of.

    Attributes:
        rank, size: this member's rank, and how many members there are.
        epoch: which incarnation of `name`; 0 lets rank 0 decide.
        addr, port: where rank 0 listens; the others connect there.
        timeout_s: how long forming the world may take.
        store: use this store for the rendezvous instead of the lifeline (a `TCPStore`, say).
    """

    name: str
    rank: int
    size: int
    epoch: int
    backends: dict[str, str]
    device: torch.device
    addr: str
    port: int
    secret: bytes
    pulse: Pulse
    timeout_s: float
    store: Store | None = None


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
        self._store = LifelineStore(lambda key, value: watchdog.call_soon(self._put, key, value))
        self._group: ProcessGroup | None = None
        self._waiters = Waiters(f"multiworld-{config.name}")
        self._pending: set[Operation] = set()
        self._casualties: list[Operation] = []
        self._draining = False
        self._settled = threading.Event()
        self._refusal = "nobody answered"
        self._seated: asyncio.Future[str] | None = None

    def __repr__(self) -> str:
        return f"<World {self.name!r} epoch={self.epoch} rank={self.rank}/{self.size} {self.state}>"

    # -- forming -------------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Meet the other members and build the group.

        Raises:
            JoinError: it did not form within `timeout_s`, or the host refused us.
            BrokenWorldException: a member was lost while it formed.
            WorldClosedError: it was closed meanwhile.
        The world is ended then, and leaves nothing behind. Cancelling ends it too.
        """
        deadline = asyncio.timeout(self._config.timeout_s)
        try:
            async with deadline:
                host = await self._take_seat()
                await self._build(host)
        except asyncio.CancelledError:
            self.break_(Cause.ABORTED, self.rank, "cancelled while joining")
            raise
        except TimeoutError:
            self.break_(Cause.TIMEOUT, -1, "did not form in time")
            raise JoinError(
                self.name,
                f"did not form within {self._config.timeout_s:g} s as rank {self.rank} of {self.size} at "
                f"{self._config.addr}:{self._config.port}: {self._refusal}",
            ) from None
        except WorldError:
            raise
        except Exception as error:
            self.break_(Cause.TRANSPORT, -1, str(error))
            raise JoinError(self.name, f"the process group could not be built: {error}") from error

    async def _take_seat(self) -> str:
        loop = asyncio.get_running_loop()
        self._seated = loop.create_future()
        self._seated.add_done_callback(lambda seated: seated.cancelled() or seated.exception())  # may go unread
        seat = Hello(self.name, self.rank, self.size, self.epoch)
        if self.rank == 0:
            self._watchdog.call_soon(self._host, seat)
        else:
            self._watchdog.call_soon(self._join, seat, await self._resolve())
        return await self._seated or self._config.addr

    async def _resolve(self) -> Address:
        """The host's address; a name that is not known yet (a container that has not started) is asked for again."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                found = await loop.getaddrinfo(self._config.addr, self._config.port, type=socket.SOCK_STREAM)
                return Address(found[0][0], (str(found[0][4][0]), self._config.port))
            except OSError as error:
                self._refusal = f"{self._config.addr} cannot be resolved: {error.strerror}"
                await asyncio.sleep(_RESOLVE_RETRY_S)

    def _host(self, seat: Hello) -> None:
        with self._lock:
            if self.state is not WorldState.JOINING:
                return
            assert self._reception is not None
            roster = Roster(self._watchdog, self, seat, self._config.pulse)
            self._watch = roster
        self._reception.host(roster)

    def _join(self, seat: Hello, address: Address) -> None:
        with self._lock:
            if self.state is WorldState.JOINING:
                self._watch = Membership(self._watchdog, self, seat, self._config.pulse, self._config.secret, address)

    async def _build(self, host: str) -> None:
        """Run the group's constructor, which blocks until all ranks are there, on a thread that nobody has to wait for."""
        loop = asyncio.get_running_loop()
        built: asyncio.Future[None] = loop.create_future()

        def settle(error: BaseException | None) -> None:
            if not built.done():
                built.set_result(None) if error is None else built.set_exception(error)

        def build() -> None:
            error: BaseException | None = None
            try:
                self._adopt(
                    make_process_group(
                        self._config.store or self._store,
                        self.rank,
                        self.size,
                        self._config.backends,
                        host,
                        self._config.timeout_s,
                        self._config.device,
                    )
                )
            except Exception as failure:  # noqa: BLE001 - handed to the caller, whatever it is
                error = self._error_if_ended() or failure.with_traceback(None)
            try:
                loop.call_soon_threadsafe(settle, error)
            except RuntimeError:
                self.break_(Cause.ABORTED, self.rank, "the event loop ended while joining")

        threading.Thread(target=build, name=f"multiworld-{self.name}-join", daemon=True).start()
        await built
        self._listener.on_world_changed(self)

    def _adopt(self, group: ProcessGroup) -> None:
        with self._lock:
            if error := self._error_if_ended():
                raise error
            self._group = group
            self.state = WorldState.READY

    # -- what the watch says (on the watchdog's thread) ------------------------------------------------------------------------

    def on_all_here(self, epoch: int, local_host: str) -> None:
        self.epoch = epoch
        self._seat_taken(local_host)

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
        self._refusal = reason
        if final:
            self._seat_refused(
                JoinError(self.name, f"rank 0 at {self._config.addr}:{self._config.port} refused us: {reason}")
            )

    def _put(self, key: str, value: bytes) -> None:
        if self._watch is not None:
            self._watch.put(key, value)

    def _seat_taken(self, local_host: str) -> None:
        self._answer_seat(lambda seated: seated.set_result(local_host))

    def _seat_refused(self, error: WorldError) -> None:
        self._answer_seat(lambda seated: seated.set_exception(error))

    def _answer_seat(self, answer: Callable[[asyncio.Future[str]], None]) -> None:
        seated = self._seated
        if seated is None or seated.get_loop().is_closed():
            return
        try:
            seated.get_loop().call_soon_threadsafe(lambda: None if seated.done() else answer(seated))
        except RuntimeError:
            logger.debug("world=%s: the event loop that joined it has ended", self.name)

    # -- operations ----------------------------------------------------------------------------------------------------------

    async def send(self, tensor: Tensor, dst: int, *, tag: int = 0, timeout_s: float | None = None) -> None:
        """Send `tensor` to rank `dst`. Completes when the receiver has posted its receive and the kernel has the data."""
        await self.finish(self.start_send(tensor, dst, tag=tag, timeout_s=timeout_s))

    async def recv(self, tensor: Tensor, src: int, *, tag: int = 0, timeout_s: float | None = None) -> None:
        """Receive into `tensor`, in place, what rank `src` sends. Size and dtype must be the sender's."""
        await self.finish(self.start_recv(tensor, src, tag=tag, timeout_s=timeout_s))

    def start_send(self, tensor: Tensor, dst: int, *, tag: int = 0, timeout_s: float | None = None) -> Operation:
        """Post the send and return at once; `finish` awaits it."""
        self._check_peer(dst)
        tensor = tensor.contiguous()
        return self._start_p2p("send", lambda group: group.send([tensor], dst, tag), dst, tensor, timeout_s)

    def start_recv(self, tensor: Tensor, src: int, *, tag: int = 0, timeout_s: float | None = None) -> Operation:
        """Post the receive and return at once; `finish` awaits it."""
        self._check_peer(src)
        if not tensor.is_contiguous():
            raise ValueError(
                f"world {self.name!r}: recv needs a contiguous tensor to write into, got strides {tensor.stride()}"
            )
        return self._start_p2p("recv", lambda group: group.recv([tensor], src, tag), src, tensor, timeout_s)

    async def finish(self, operation: Operation) -> None:
        """Await a started operation.

        Raises:
            BrokenWorldException: a member failed; the tensor's contents are undefined.
            WorldClosedError: we closed the world meanwhile.
        Cancelling breaks this world, and no other: a half-sent message has no owner.
        """
        try:
            await operation.future
        except asyncio.CancelledError:
            if not operation.future.done() or operation.future.cancelled():
                self.break_(Cause.ABORTED, self.rank, f"{operation.name} cancelled")
            raise

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(
                f"world {self.name!r}: rank {peer} is no peer of rank {self.rank} in a world of {self.size}"
            )

    def _start_p2p(
        self, name: str, post: Callable[[ProcessGroup], Work], peer: int, tensors: Any, timeout_s: float | None
    ) -> Operation:
        operation = self._post(name, post, peer, tensors, timeout_s)
        if operation.work is not None:
            self._waiters.run(lambda: self._wait(operation))
        return operation

    def _post(
        self, name: str, post: Callable[[ProcessGroup], Work], peer: int, tensors: Any, timeout_s: float | None
    ) -> Operation:
        """Hand an operation to c10d. A group that refuses it at once has lost a connection: the world is breaking."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            if error := self._error_if_ended():
                raise error
            group = self._group
            if group is None:
                raise WorldError(self.name, "still joining: await its initialisation before using it")
            try:
                operation = Operation(name, peer, post(group), tensors, timeout_s, future)
            except RuntimeError as refusal:
                operation = Operation(name, peer, None, tensors, timeout_s, future)
                self._pending.add(operation)
                self._fail(operation, refusal.with_traceback(None))
                return operation
            self._pending.add(operation)
        return operation

    def _wait(self, operation: Operation) -> None:
        self._complete(operation, operation.wait())

    def _complete(self, operation: Operation, error: RuntimeError | None) -> None:
        """c10d is done with the operation. Called on a waiting thread, or on Gloo's own for a collective."""
        if error is not None:
            self._fail(operation, error)
            return
        with self._lock:
            self._pending.discard(operation)
            drained = self._draining and not self._pending
        operation.resolve(None)
        if drained:
            self._watchdog.call_soon(self._settle_when_drained)

    def _fail(self, operation: Operation, error: RuntimeError) -> None:
        """An operation failed. Its caller learns why once that is known, which is when the world has been broken."""
        with self._lock:
            self._pending.discard(operation)
            verdict = self._error_if_ended()
            if verdict is None or self._draining:
                self._casualties.append(operation)
        if verdict is not None and not self._draining:
            operation.resolve(verdict)
            return
        elapsed_s = time.monotonic() - operation.started_s
        if cause_of_failure(elapsed_s, operation.timeout_s) is Cause.TIMEOUT:
            self.break_(Cause.TIMEOUT, operation.peer, f"{operation.name} took over {operation.timeout_s:g} s")
        else:
            detail = f"{operation.name}: {error}"
            self._watchdog.call_soon(self._await_verdict, operation.peer, detail, time.monotonic() + _VERDICT_GRACE_S)

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
            self._draining = cause is Cause.LEFT
        if formed:
            logger.warning(
                "world=%s epoch=%d rank=%d ready->broken cause=%s by=%d %s",
                self.name,
                self.epoch,
                self.rank,
                cause,
                rank,
                detail,
            )
        self._seat_refused(self.failure)
        self._watchdog.call_soon(self._part, cause, rank, detail)
        threading.Thread(target=self._reclaim, name=f"multiworld-{self.name}-reclaim", daemon=True).start()
        if formed:
            self._listener.on_world_changed(self)

    def close(self) -> None:
        """Say goodbye and end this world. Idempotent; what is pending raises WorldClosedError. `reclaimed` tells when all is freed."""
        with self._lock:
            if self.state in (WorldState.BROKEN, WorldState.CLOSED):
                return
            formed = self.state is WorldState.READY
            self.state = WorldState.CLOSED
        logger.info("world=%s epoch=%d rank=%d ->closed", self.name, self.epoch, self.rank)
        self._seat_refused(WorldClosedError(self.name, "closed while joining"))
        self._watchdog.call_soon(self._part, Cause.LEFT if formed else Cause.ABORTED, self.rank, "")
        threading.Thread(target=self._reclaim, name=f"multiworld-{self.name}-reclaim", daemon=True).start()
        self._listener.on_world_changed(self)

    def _error_if_ended(self) -> WorldError | None:
        """A fresh error each time: an exception that is raised in several places gathers all their tracebacks."""
        if self.state is WorldState.CLOSED:
            return WorldClosedError(self.name, "closed by this process")
        if self.state is WorldState.BROKEN:
            assert self.failure is not None
            return BrokenWorldException(*self.failure.args)
        return None

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
        with self._lock:
            busy = bool(self._pending)
        if self._watch is not None and (not busy or self.state is WorldState.CLOSED):
            self._watch.settle()

    def _reclaim(self) -> None:
        """Free everything, on a thread of its own: aborting takes milliseconds for Gloo, and may hang for NCCL."""
        if not self._pending or self._draining:
            self._settled.wait(_LINGER_S)
        self._store.abort(self._error_if_ended() or JoinError(self.name, "ended"))
        group, self._group = self._group, None
        if group is not None:
            abort_process_group(group, self.rank, self.size, self._config.backends)
            del group
        with self._lock:
            self._draining = False
            casualties, self._casualties = self._casualties, []
        for operation in casualties:
            operation.resolve(self._error_if_ended())
        del casualties
        if not self._waiters.close(_RECLAIM_S):
            self._give_up_on_waiters()
        self._watchdog.call_soon(self._detach)

    def _give_up_on_waiters(self) -> None:
        logger.error("world=%s: operations did not come back %.0f s after the abort", self.name, _RECLAIM_S)
        with self._lock:
            stuck, self._pending = self._pending, set()
        for operation in stuck:
            operation.resolve(self._error_if_ended())

    def _detach(self) -> None:
        if self._watch is not None:
            self._watch.detach()
            self._watch = None
        self.reclaimed.set()
