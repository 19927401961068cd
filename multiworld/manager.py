"""The public entry of the library: opens, lists and closes the worlds of one process, and reports their state changes.

A `WorldManager` owns the control loop, the listeners and the worlds. Collectives and point-to-point operations are in communicator.py.
"""

import asyncio
import atexit
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType

import torch
from torch._C._distributed_c10d import Store

from multiworld.communicator import WorldCommunicator
from multiworld.config import WorldConfig
from multiworld.control.loop import WatchDog
from multiworld.errors import WorldClosedError, WorldExistsError, WorldNotFoundError
from multiworld.events import EventStream, WorldEvent
from multiworld.execution.process_group import NCCL, check_nccl_device, parse_backend
from multiworld.listeners import Answerer, Listener, ListenerRegistry, listening_host, resolved_host
from multiworld.membership.bootstrap import builders
from multiworld.membership.generations import Epochs
from multiworld.membership.monitor import HeartbeatConfig
from multiworld.world import World, WorldState

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29500
"""The port of rank 0 when none is given. Many worlds may share it."""
_ENDED_KEPT = 1000
"""Limit of ended worlds that are kept by name."""
_CLEANUP_S = 10.0
_WATCHDOG_S = 5.0
_EXIT_S = 30.0
"""At process exit, how long to wait for groups under construction. Gloo gives up within 25 s."""


@dataclass(frozen=True, slots=True)
class _Leftovers:
    """What `cleanup` has detached from the manager and must close."""

    worlds: set[World]
    doors: list[Listener]
    watchdog: WatchDog | None


class WorldManager:
    """Owns the worlds of this process and the control loop that serves them.

    Use it as `async with WorldManager() as manager`, or call `cleanup` at the end. The constructor starts nothing; the first world or
    `listen` starts the control loop.

    Args:
        enable_monitor: False turns the heartbeat timeout off. Then only a closed connection or a stalled event loop reveals a failure.
        secret: the shared secret that all members must know. If empty, any process that reaches the port can join.
        checked: compare the fingerprints of every collective before its data is sent. A mismatch then breaks the world with cause
            `error`; without the check it can end the process. Costs a short exchange per collective. `initialize_world` may override it.
        heartbeat_interval_s, heartbeat_timeout_s: seconds between heartbeats, and seconds without data after which a member counts as hung.
        loop_stall_timeout_s: seconds after which a member whose event loop does not run counts as stalled. Our heartbeats then carry the
            count of the event loop on which the first world was opened; members without a count are not checked. None, the default,
            turns this off, for programs that compute or block on their event loop, or run it only at times.
        bind_host: the local address of connections to other members, and the address at which they reach us. Empty lets the kernel
            choose, by the route to rank 0.
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
        loop_stall_timeout_s: float | None = None,
    ) -> None:
        self._secret = secret.encode() if isinstance(secret, str) else secret
        self._pulse = HeartbeatConfig(
            heartbeat_interval_s, heartbeat_timeout_s if enable_monitor else float("inf"), loop_stall_timeout_s
        )
        self._checked = checked
        self._bind_host = bind_host
        self._watchdog: WatchDog | None = None
        self._worlds: dict[str, World] = {}
        self._announced: set[str] = set()
        self._ended: weakref.WeakSet[World] = weakref.WeakSet()
        self._epochs = Epochs()
        self._doors = ListenerRegistry(self._secret, self._pulse)
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
        """The worlds of this process by name, as a copy. Includes the latest 1000 ended worlds that were not removed or replaced."""
        return dict(self._worlds)

    def events(self) -> AsyncIterator[WorldEvent]:
        """Return an iterator over the state changes of all worlds from now on. It ends when the manager is cleaned up."""
        return self._events.subscribe()

    def world(self, world_name: str) -> World:
        """Return the world of that name. Raises WorldNotFoundError."""
        try:
            return self._worlds[world_name]
        except KeyError:
            raise WorldNotFoundError(world_name, "never initialised here, or removed") from None

    def is_broken(self, world_name: str) -> bool:
        """Whether the world cannot be used: it broke, was closed or removed, or was never opened here."""
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
        """Join a world and wait until all its members have joined. Members may start in any order.

        Args:
            rank, world_size: this member's rank and the number of members. Rank 0 listens on `addr`:`port`; the others connect.
            backend: "gloo", "nccl" or "cpu:gloo,cuda:nccl". "gloo" and "tcp" are the same: the library's own connections carry all
                operations, and CUDA tensors are copied through host memory. A world of two then needs one open port, at rank 0.
                "c10d-gloo" uses PyTorch's Gloo for the collectives.
            port: -1 means 29500. Many worlds may share a port. To use a free port, call `listen` and pass the port that it returns; with 0,
                rank 0 opens a free port that is not reported.
            timeout: seconds that forming the world may take.
            device: the CUDA device that NCCL uses; its tensors must be on it. Without an index the caller's current device. NCCL is
                experimental.
            epoch: the generation of the name to join; 0 means the next one that rank 0 opens.
            store: a rendezvous store to use in place of the control connections, for example a `TCPStore`. Each generation of the world
                uses its own key prefix. Either all members pass a store or none.
            checked: overrides the manager's setting unless None. Must be the same at all members.
        Raises:
            WorldExistsError: a world of that name is open here.
            JoinError: the world did not form in time, or rank 0 refused us.
            BrokenWorldException: a member was lost while the world formed.
            OSError: rank 0 cannot listen on `addr`:`port`.
            RuntimeError: no thread is available.
            ValueError: invalid rank, size, port or backend.
        After an error everything is freed and the name can be used again.
        """
        if world_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"world {world_name!r}: rank {rank} does not exist in a world of {world_size}")
        port = DEFAULT_PORT if port == -1 else port
        if not 0 <= port <= 65535:
            raise ValueError(f"world {world_name!r}: {port} is no port: expected 1 to 65535, or -1 for {DEFAULT_PORT}")
        backends = parse_backend(backend)
        nccl_device = check_nccl_device(device) if "nccl" in backends.values() else None
        if nccl_device is not None:
            logger.warning("world=%s uses NCCL, which is experimental: see docs/gpu.md", world_name)
        host = await resolved_host(world_name, addr, timeout) if rank == 0 else ""
        with self._lock:
            self._refuse_second(world_name)
            door = self._doors.open(host, port, self._running_watchdog) if rank == 0 else None
            if rank == 0:
                epoch = self._epochs.take(world_name, epoch)
            config = WorldConfig(
                name=world_name,
                rank=rank,
                size=world_size,
                epoch=epoch,
                backends=backends,
                device=nccl_device,
                addr=addr,
                port=port,
                secret=self._secret,
                pulse=self._pulse,
                timeout_s=timeout,
                store=store,
                checked=(self._checked if checked is None else checked) and set(backends.values()) != {NCCL},
                bind_host=self._bind_host,
            )
            self._announced.discard(world_name)
            world = World(config, self._running_watchdog(), door.reception if door else None, self)
            self._worlds[world_name] = world
            self._forget_ended()
            if door is not None:
                door.worlds.add(world)
            if self._pulse.loop_stall_timeout_s is not None:
                self._running_watchdog().loop_counter.register(asyncio.get_running_loop(), self._pulse.interval_s)
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

    def _forget_ended(self) -> None:
        """Remove all but the latest `_ENDED_KEPT` ended worlds. Programs may use a new name for every job."""
        ended = [name for name, world in self._worlds.items() if world.state in (WorldState.BROKEN, WorldState.CLOSED)]
        for name in ended[:-_ENDED_KEPT]:
            del self._worlds[name]

    def add_world(self, world_name: str, backend: str) -> None:
        """Announce a world that `initialize_world` will open; until then `is_broken` is False for it. For compatibility with pymultiworld.

        Raises WorldExistsError, and ValueError for an unknown backend.
        """
        parse_backend(backend)
        with self._lock:
            if not self.is_broken(world_name):
                raise WorldExistsError(world_name, "there already")
            self._announced.add(world_name)

    def let_in(self, *secrets: bytes) -> None:
        """Accept new members and queries only from processes that know one of `secrets`. Existing connections stay open.

        To change the secret without an interruption: accept the old and the new one, change the other processes to the new one, then
        accept only the new one. When this process connects to another one, it still uses the `secret` of the constructor.
        """
        if not secrets:
            raise ValueError("let_in: at least one secret must be known to who comes")
        with self._lock:
            self._doors.let_in(secrets)

    def listen(self, addr: str = "127.0.0.1", port: int = 0, sock: socket.socket | None = None) -> int:
        """Open a port for worlds and queries, and keep it open until the cleanup. Port 0 lets the kernel choose.

        Args:
            sock: a TCP socket that listens on `addr`:`port` already; closed at the cleanup.
        Returns the port. Raises OSError.
        """
        host = listening_host(addr)
        with self._lock:
            door = self._doors.open(host, port, self._running_watchdog, sock)
            door.pinned = True
            return door.reception.port

    def answer(self, addr: str, port: int, answerer: Answerer) -> None:
        """Answer the queries of `ask` on an open port with `answerer`, on the running event loop. Raises KeyError if it is not open."""
        self._doors.at(addr, port).answer(answerer)

    def _running_watchdog(self) -> WatchDog:
        if self._watchdog is None:
            watchdog = WatchDog()
            watchdog.start()
            self._watchdog = watchdog
            _open_managers.add(self)
        return self._watchdog

    # -- ending --------------------------------------------------------------------------------------------------------------

    def on_world_changed(self, world: World) -> None:
        """Publish the state change of a world, and release an ended one. Callable from any thread."""
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
        """Remove an ended world from its listener, and close the listener if it is idle."""
        with self._lock:
            self._ended.add(world)
            self._doors.leave(world)
            watchdog = self._watchdog
        if watchdog is not None:
            watchdog.call_soon(self._close_idle_doors, watchdog)

    def _close_idle_doors(self, watchdog: WatchDog) -> None:
        """Close idle listeners. Runs on the control loop's thread, under the lock, so that another caller finds the port open or free."""
        with self._lock:
            if self._watchdog is watchdog:
                self._doors.close_idle()

    def remove_world(self, world_name: str) -> None:
        """Close a world and remove its name. Its resources are freed in the background; `close_world` waits for that.

        A world that another thread opens under the same name in the meantime is not affected.

        Raises WorldNotFoundError.
        """
        with self._lock:
            if world_name in self._announced:
                self._announced.discard(world_name)
                return
            world = self.world(world_name)
        self._drop(world)

    async def close_world(self, world_name: str) -> None:
        """Like `remove_world`, but wait at most 10 s until all its resources are freed. Raises WorldNotFoundError."""
        world = self.world(world_name)
        self._drop(world)
        await _until(world.reclaimed.is_set, time.monotonic() + _CLEANUP_S)

    def _drop(self, world: World) -> None:
        """Close this world, and remove its name if no other world has it by now. Idempotent."""
        world.close()
        with self._lock:
            if self._worlds.get(world.name) is world:
                del self._worlds[world.name]

    async def aclose(self) -> None:
        """Like `cleanup`, without blocking the event loop."""
        leftovers, until_s = self._part(), time.monotonic() + _CLEANUP_S
        for world in leftovers.worlds:
            await _until(world.reclaimed.is_set, until_s)
        self._free(leftovers, wait_s=0.0)
        if watchdog := leftovers.watchdog:
            await _until(lambda: not watchdog.is_running, until_s)

    def cleanup(self) -> None:
        """Close all worlds and listeners and free threads, sockets and memory. Blocks for at most about 15 s.

        Idempotent. The manager can be used again afterwards. Resources that were not freed in time are logged as an error.
        """
        leftovers, until_s = self._part(), time.monotonic() + _CLEANUP_S
        for world in leftovers.worlds:
            world.wait_until_reclaimed(until_s - time.monotonic())
        self._free(leftovers, wait_s=_WATCHDOG_S)

    def _part(self) -> _Leftovers:
        """Close all worlds, and detach worlds, listeners and the control loop from this manager."""
        with self._lock:
            worlds, self._worlds = list(self._worlds.values()), {}
            watchdog, self._watchdog = self._watchdog, None
            doors = self._doors.give_up()
        for world in worlds:
            world.close()
        with self._lock:
            return _Leftovers({*worlds, *self._ended}, doors, watchdog)

    def _free(self, leftovers: _Leftovers, wait_s: float) -> None:
        """Close the listeners and stop the control loop. Logs worlds that are not freed.

        Args:
            wait_s: how long to wait for the control loop's thread.
        """
        for world in leftovers.worlds:
            world.wait_until_reclaimed(0.0)
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
    """Wait until `done()` is true, or until `until_s` by `time.monotonic`.

    It polls, because a thread to wait on may not be available when the process is short of memory.
    """
    pause_s = 0.001
    while not done() and time.monotonic() < until_s:
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


_open_managers: weakref.WeakSet[WorldManager] = weakref.WeakSet()


# A forked child has no threads that serve worlds, and must not close the worlds of its parent.
os.register_at_fork(after_in_child=_open_managers.clear)
os.register_at_fork(after_in_child=builders.clear)


@atexit.register
def _cleanup_all() -> None:
    """Clean up at process exit. The interpreter would abort if threads were still inside c10d."""
    for manager in list(_open_managers):
        manager.cleanup()
    deadline_s = time.monotonic() + _EXIT_S
    for builder in list(builders):  # Gloo's constructor cannot be interrupted when a peer froze while it connected
        builder.join(max(0.0, deadline_s - time.monotonic()))
