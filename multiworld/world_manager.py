"""The worlds of one process: opening, closing, and hearing what becomes of them."""

import asyncio
import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType

import torch
from torch._C._distributed_c10d import Store

from multiworld.doors import Answerer, Door, Doors, listening_host
from multiworld.errors import WorldClosedError, WorldExistsError, WorldNotFoundError
from multiworld.events import EventStream, WorldEvent
from multiworld.forming import builders
from multiworld.process_group import parse_backend
from multiworld.rendezvous import Pulse
from multiworld.watchdog import WatchDog
from multiworld.world import World, WorldState
from multiworld.world_communicator import WorldCommunicator
from multiworld.world_config import WorldConfig

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29500
"""Where rank 0 listens when no port is given; many worlds share it."""
_CLEANUP_S = 10.0
_WATCHDOG_S = 5.0
_EXIT_S = 30.0
"""How long the end of the process may wait for a group that is still being built; Gloo gives up within 25 s."""


@dataclass(frozen=True, slots=True)
class _Leftovers:
    """What a manager that ends has parted with."""

    worlds: set[World]
    doors: list[Door]
    watchdog: WatchDog | None


class WorldManager:
    """Owns the worlds of this process and the one thread that watches them.

    Use it as `async with WorldManager() as manager`, or call `cleanup` at the end. Nothing is started before the first world.

    Args:
        enable_monitor: False turns the judging of silence off: only a connection that ends breaks a world.
        secret: whoever joins a world of ours must know it. Empty lets everybody in who reaches the port.
        checked: agree on sizes and dtypes before every operation, so that a mismatch breaks the world and not the process, at the
            cost of a short exchange; `initialize_world` may say otherwise for a world.
        heartbeat_interval_s, heartbeat_timeout_s: how often members beat, and after how long a silence they count as hung.
        bind_host: the address of this machine that connections to other members leave from, which is also where those reach us;
            empty lets the kernel choose, by where rank 0 is.
    """

    def __init__(
        self,
        enable_monitor: bool = True,
        *,
        secret: bytes | str = b"",
        heartbeat_interval_s: float = 0.2,
        heartbeat_timeout_s: float = 1.0,
        checked: bool = True,
        bind_host: str = "",
    ) -> None:
        self._secret = secret.encode() if isinstance(secret, str) else secret
        self._pulse = Pulse(heartbeat_interval_s, heartbeat_timeout_s if enable_monitor else float("inf"))
        self._checked = checked
        self._bind_host = bind_host
        self._watchdog: WatchDog | None = None
        self._worlds: dict[str, World] = {}
        self._announced: set[str] = set()
        self._ended: weakref.WeakSet[World] = weakref.WeakSet()
        self._epochs: dict[str, int] = {}
        self._doors = Doors(self._secret, self._pulse)
        self._events = EventStream()
        self._lock = threading.Lock()
        self._communicator = WorldCommunicator(self)

    async def __aenter__(self) -> "WorldManager":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def communicator(self) -> WorldCommunicator:
        """The operations, by world name."""
        return self._communicator

    @property
    def worlds(self) -> dict[str, World]:
        """The worlds of this process by name, ended ones included until their name is used again or removed. A copy."""
        return dict(self._worlds)

    def events(self) -> AsyncIterator[WorldEvent]:
        """Every change of every world from now on, until the manager is cleaned up."""
        return self._events.subscribe()

    def world(self, world_name: str) -> World:
        """Raises WorldNotFoundError."""
        try:
            return self._worlds[world_name]
        except KeyError:
            raise WorldNotFoundError(world_name, "never initialised here, or removed") from None

    def is_broken(self, world_name: str) -> bool:
        """Whether that world cannot be used any more: it broke, was closed or removed, or never was."""
        if world_name in self._announced:
            return False
        world = self._worlds.get(world_name)
        return world is None or world.state in (WorldState.BROKEN, WorldState.CLOSED)

    # -- opening -------------------------------------------------------------------------------------------------------------

    async def initialize_world(
        self,
        world_name: str,
        rank: int,
        world_size: int,
        backend: str = "gloo",
        addr: str = "127.0.0.1",
        port: int = -1,
        timeout: float = 30,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable; pymultiworld's signature
        *,
        epoch: int = 0,
        store: Store | None = None,
        checked: bool | None = None,
    ) -> World:
        """Join a world, together with its other members, in whatever order they start.

        Args:
            rank, world_size: this member's rank and how many there are. Rank 0 listens on `addr`:`port`, the others connect.
            backend: "gloo", "nccl", "cpu:gloo,cuda:nccl", or "lines": messages, all_reduce and barrier alone, and of a world of
                two only rank 0 must be within the other's reach, at one port.
            port: -1 is 29500. Many worlds may share a port. 0 suits rank 0 only behind `listen`, which says what it took.
            timeout: seconds that forming the world may take.
            device: the CUDA device that NCCL uses; the CPU needs none.
            epoch: which incarnation of the name to join; 0 is the next that rank 0 opens.
            store: a rendezvous store to use in place of the lifeline, a `TCPStore` say.
            checked: as of the manager when None; the same at all members.
        Raises:
            WorldExistsError: a world of that name is open here.
            JoinError: it did not form in time, or rank 0 refused us.
            BrokenWorldException: a member was lost while it formed.
            OSError: rank 0 cannot listen there.
            ValueError: a rank, size or backend that cannot be.
        After an error nothing is left behind, and the name is free.
        """
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"world {world_name!r}: rank {rank} does not exist in a world of {world_size}")
        port = DEFAULT_PORT if port == -1 else port
        if not 0 <= port <= 65535:
            raise ValueError(f"world {world_name!r}: {port} is no port: expected 1 to 65535, or -1 for {DEFAULT_PORT}")
        backends = parse_backend(backend)
        host = listening_host(addr) if rank == 0 else ""
        with self._lock:
            self._refuse_second(world_name)
            door = self._doors.open(host, port, self._running_watchdog) if rank == 0 else None
            if rank == 0:
                epoch = epoch or self._epochs.get(world_name, 0) + 1
                self._epochs[world_name] = max(epoch, self._epochs.get(world_name, 0))
            config = WorldConfig(
                name=world_name,
                rank=rank,
                size=world_size,
                epoch=epoch,
                backends=backends,
                device=device,
                addr=addr,
                port=port,
                secret=self._secret,
                pulse=self._pulse,
                timeout_s=timeout,
                store=store,
                checked=(self._checked if checked is None else checked) and "gloo" in backends.values(),
                bind_host=self._bind_host,
            )
            self._announced.discard(world_name)
            world = World(config, self._running_watchdog(), door.reception if door else None, self)
            self._worlds[world_name] = world
            if door is not None:
                door.worlds.add(world)
        try:
            await world.open()
        except BaseException:
            world.close()
            self._release(world)
            raise
        return world

    def _refuse_second(self, world_name: str) -> None:
        """Raises WorldExistsError while a world of that name is open here."""
        known = self._worlds.get(world_name)
        if known is not None and known.state in (WorldState.JOINING, WorldState.READY):
            raise WorldExistsError(world_name, f"{known.state} here already; remove it first or choose another name")

    def add_world(self, world_name: str, backend: str) -> None:
        """Announce a world that `initialize_world` will open. Only pymultiworld's programs need it.

        Raises WorldExistsError, and ValueError for a backend that is not known.
        """
        parse_backend(backend)
        with self._lock:
            if not self.is_broken(world_name):
                raise WorldExistsError(world_name, "there already")
            self._announced.add(world_name)

    def let_in(self, *secrets: bytes) -> None:
        """Who knows one of these may come to our worlds and questions from now on, and nobody else. Who is in a world stays there.

        To change a secret without an interruption: let in who knows the old or the new one, have the others change over, then let in
        the new one alone. What we say to hosts elsewhere stays `secret`.
        """
        if not secrets:
            raise ValueError("let_in: at least one secret must be known to who comes")
        with self._lock:
            self._doors.let_in(secrets)

    def listen(self, addr: str = "127.0.0.1", port: int = 0) -> int:
        """Open a port for worlds and questions, and keep it open. Gives the port, which 0 lets the kernel choose. Raises OSError."""
        host = listening_host(addr)
        with self._lock:
            door = self._doors.open(host, port, self._running_watchdog)
            door.pinned = True
            return door.reception.port

    def answer(self, addr: str, port: int, answerer: Answerer) -> None:
        """Answer what `ask` asks on that open port, on the loop that runs now. Raises KeyError when `listen` did not open it."""
        self._doors.at(addr, port).answer(answerer)

    def _running_watchdog(self) -> WatchDog:
        if self._watchdog is None:
            self._watchdog = WatchDog()
            self._watchdog.start()
            _open_managers.add(self)
        return self._watchdog

    # -- ending --------------------------------------------------------------------------------------------------------------

    def on_world_changed(self, world: World) -> None:
        """A world tells of itself, from any thread."""
        failure = world.failure
        if world.state is WorldState.READY:
            self._events.publish(WorldEvent("joined", world.name, world.epoch))
        elif world.state is WorldState.BROKEN and failure is not None:
            self._events.publish(WorldEvent("broken", world.name, world.epoch, failure.cause, failure.rank))
        else:
            self._events.publish(WorldEvent("closed", world.name, world.epoch))
        if world.state in (WorldState.BROKEN, WorldState.CLOSED):
            self._release(world)

    def _release(self, world: World) -> None:
        """Let go of the port of an ended world when nothing else needs it."""
        with self._lock:
            self._ended.add(world)
            self._doors.leave(world)
            watchdog = self._watchdog
        if watchdog is not None:
            watchdog.call_soon(self._close_idle_doors, watchdog)

    def _close_idle_doors(self, watchdog: WatchDog) -> None:
        """On the watchdog's thread and under the lock: whoever opens that port next finds it open, or free."""
        with self._lock:
            if self._watchdog is watchdog:
                self._doors.close_idle()

    def remove_world(self, world_name: str) -> None:
        """Say goodbye to a world and forget its name. Its memory is freed within a moment; `close_world` waits for that.

        Raises WorldNotFoundError.
        """
        if world_name in self._announced:
            self._announced.discard(world_name)
            return
        self.world(world_name).close()
        del self._worlds[world_name]

    async def close_world(self, world_name: str) -> None:
        """Like `remove_world`, and return once nothing of it is left. Raises WorldNotFoundError."""
        world = self.world(world_name)
        self.remove_world(world_name)
        await _until(world.reclaimed.is_set, time.monotonic() + _CLEANUP_S)

    async def aclose(self) -> None:
        """`cleanup` without holding up the event loop."""
        leftovers, until_s = self._part(), time.monotonic() + _CLEANUP_S
        for world in leftovers.worlds:
            await _until(world.reclaimed.is_set, until_s)
        self._free(leftovers, wait_s=0.0)
        if watchdog := leftovers.watchdog:
            await _until(lambda: not watchdog.is_running, until_s)

    def cleanup(self) -> None:
        """Say goodbye to all worlds, free everything, and return: threads, sockets, memory. Idempotent; the manager is usable again."""
        leftovers, until_s = self._part(), time.monotonic() + _CLEANUP_S
        for world in leftovers.worlds:
            world.reclaimed.wait(max(0.0, until_s - time.monotonic()))
        self._free(leftovers, wait_s=_WATCHDOG_S)

    def _part(self) -> _Leftovers:
        """Say goodbye to all worlds, and have nothing to do with any of it from now on."""
        with self._lock:
            worlds, self._worlds = list(self._worlds.values()), {}
            watchdog, self._watchdog = self._watchdog, None
            doors = self._doors.give_up()
        for world in worlds:
            world.close()
        with self._lock:
            return _Leftovers({*worlds, *self._ended}, doors, watchdog)

    def _free(self, leftovers: _Leftovers, wait_s: float) -> None:
        """Close what the worlds, which are reclaimed by now, no longer need.

        Args:
            wait_s: for the watchdog's thread to end.
        """
        for world in leftovers.worlds:
            if not world.reclaimed.is_set():
                logger.error("%r was not freed within %.0f s", world, _CLEANUP_S)
        if leftovers.watchdog is not None:
            for door in leftovers.doors:
                leftovers.watchdog.call_soon(door.reception.close)
            leftovers.watchdog.stop(wait_s)
        self._events.publish(None)
        _open_managers.discard(self)

    def raise_if_ended(self, world_name: str) -> None:
        """Raises BrokenWorldException, WorldClosedError or WorldNotFoundError when the world cannot be used."""
        world = self.world(world_name)
        if world.failure is not None:
            raise type(world.failure)(*world.failure.args)
        if world.state is WorldState.CLOSED:
            raise WorldClosedError(world_name, "closed by this process")


async def _until(done: Callable[[], bool], until_s: float) -> None:
    """Wait for it, or for the time to be over.

    Not by a thread: who closes a world for a lack of memory may get none, and would wait for it for ever.
    """
    pause_s = 0.001
    while not done() and time.monotonic() < until_s:
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


_open_managers: weakref.WeakSet[WorldManager] = weakref.WeakSet()


# A forked child has the sockets, but not the threads that serve them: nothing there is its to close.
os.register_at_fork(after_in_child=_open_managers.clear)
os.register_at_fork(after_in_child=builders.clear)


@atexit.register
def _cleanup_all() -> None:
    """A process that just ends must not leave threads inside c10d: the interpreter would abort on them."""
    for manager in list(_open_managers):
        manager.cleanup()
    deadline_s = time.monotonic() + _EXIT_S
    for builder in list(builders):  # Gloo's constructor cannot be woken when a peer froze while it connected
        builder.join(max(0.0, deadline_s - time.monotonic()))
