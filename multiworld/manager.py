"""The public entry of the library: opens, lists and closes the worlds of one process, and reports their state changes.

A `WorldManager` owns the control loop, the listening ports and the worlds. The operations are in communicator.py.
"""

import asyncio
import atexit
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from multiworld.collectives.nccl import check_nccl_device, uses_nccl
from multiworld.communicator import WorldCommunicator
from multiworld.config import HEARTBEAT_TIMEOUT_S, HeartbeatConfig, WorldConfig
from multiworld.control.loop import ControlLoop
from multiworld.errors import WorldExistsError, WorldNotFoundError
from multiworld.events import EventStream, WorldEvent
from multiworld.membership.acceptor import Answerer
from multiworld.membership.listeners import Listeners, default_runtime_dir, listening_address, listening_host
from multiworld.transport.memory import HostMemory, Register
from multiworld.transport.segments import SegmentPool
from multiworld.world import World, WorldState

logger = logging.getLogger(__name__)

DEFAULT_PORT = 29500
"""The port of rank 0 when none is given. Many worlds may share it."""
_MAX_ENDED = 1000
"""How many ended worlds are kept by name."""
_MAX_GENERATIONS = 10_000
"""Limit of names whose generation is remembered. Programs may use a new name for every job."""
_SHARED_MEMORY_BYTES = 1 << 28
_CLEANUP_S = 10.0
_CONTROL_LOOP_S = 5.0
_RETRY_S = 0.05


class WorldManager:
    """Owns the worlds of this process and the control loop that serves them.

    Use it as `async with WorldManager() as manager`, or call `cleanup` at the end. The constructor starts nothing; the first world or
    `listen` starts the control loop.

    Args:
        enable_monitor: False turns the heartbeat timeout off. Then only a closed connection or a stalled event loop reveals a failure.
        secret: the shared secret that all members must know. If empty, any process that reaches the port can join.
        verify_collectives: compare the fingerprints of every collective before its data is sent. A mismatch breaks the world with cause
            `error`. Costs a short exchange per collective. `initialize_world` may override it.
        heartbeat_interval_s, heartbeat_timeout_s: seconds between heartbeats, and seconds without data after which a member is
            unresponsive. The end of a process is detected immediately, so a shorter timeout only helps to detect frozen members.
        loop_stall_timeout_s: seconds after which a member whose event loop does not run is stalled. Our heartbeats then carry the
            count of the event loop on which the first world was opened; members without a count are not checked. None, the default,
            turns this off, for programs that compute or block on their event loop, or run it only at times.
        bind_host: the local address of connections to other members, and the address at which they reach us. Empty lets the kernel
            choose, by the route to rank 0.
        shared_memory_bytes: limit of the shared memory for tensors that this process sends to members on its host. With 0 they are
            connected by TCP. None takes the environment variable MULTIWORLD_SHARED_MEMORY_BYTES, else 256 MiB.
        runtime_dir: the folder under which the Unix socket for members on this host is made, in a folder of this user. Containers that
            share a host and this folder are connected so. None takes MULTIWORLD_RUNTIME_DIR, else XDG_RUNTIME_DIR, TMPDIR or
            /tmp, whichever first has a path that is short enough.
        on_shared_memory_missing: called on any thread, also in the middle of operations, for each tensor that is copied through a socket
            because the system has no shared memory for it. Must not block or raise.
        register_shared_memory: prepares shared memory, for example with `cudaHostRegister`, which makes copies between a GPU and it fast.
            Called on any thread with address, size in bytes, and whether the memory may be written: for each new segment, and for each
            segment of a peer in which a view arrives. Both are used many times. Such views may only be read: writing to them ends the
            process. Returns a function that is called before the memory is freed. Neither may raise. None: nothing.
    """

    def __init__(
        self,
        enable_monitor: bool = True,
        *,
        secret: bytes | str = b"",
        heartbeat_interval_s: float = 0.2,
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        verify_collectives: bool = True,
        bind_host: str = "",
        loop_stall_timeout_s: float | None = None,
        shared_memory_bytes: int | None = None,
        runtime_dir: str | None = None,
        on_shared_memory_missing: Callable[[], None] = lambda: None,
        register_shared_memory: Register | None = None,
    ) -> None:
        if shared_memory_bytes is None:
            shared_memory_bytes = int(os.environ.get("MULTIWORLD_SHARED_MEMORY_BYTES", _SHARED_MEMORY_BYTES))
        memory, is_registered = HostMemory(register_shared_memory), register_shared_memory is not None
        self._segments = SegmentPool(shared_memory_bytes, on_shared_memory_missing, memory, keep_mappings=is_registered)
        folder = default_runtime_dir() if runtime_dir is None else runtime_dir
        self._secret = secret.encode() if isinstance(secret, str) else secret
        self._heartbeat = HeartbeatConfig(
            heartbeat_interval_s, heartbeat_timeout_s if enable_monitor else float("inf"), loop_stall_timeout_s
        )
        self._verify_collectives = verify_collectives
        self._bind_host = bind_host
        self._control_loop: ControlLoop | None = None
        self._worlds: dict[str, World] = {}
        self._created: weakref.WeakSet[World] = weakref.WeakSet()
        self._generations: dict[str, int] = {}
        """The latest generation of each name that this process hosted as rank 0; the oldest first."""
        self._listeners = Listeners(self._secret, folder if shared_memory_bytes else "")
        self._events = EventStream()
        self._lock = threading.Lock()
        self.communicator = WorldCommunicator(self)
        """The operations, by world name."""

    async def __aenter__(self) -> "WorldManager":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def worlds(self) -> dict[str, World]:
        """Return the worlds of this process by name, as a copy. Includes the latest 1000 ended worlds that were not removed or replaced."""
        return dict(self._worlds)

    def events(self) -> AsyncIterator[WorldEvent]:
        """Return an iterator over the state changes of all worlds from now on. It ends when the manager is cleaned up."""
        return self._events.subscribe()

    def world(self, world_name: str) -> World:
        """Return the world of that name. Raises WorldNotFoundError."""
        try:
            return self._worlds[world_name]
        except KeyError:
            raise WorldNotFoundError(world_name, "not initialized in this process, or removed") from None

    def is_broken(self, world_name: str) -> bool:
        """Return whether the world cannot be used: it broke, was closed or removed, or was never opened here."""
        world = self._worlds.get(world_name)
        return world is None or world.state.ended

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized contiguous tensor on the CPU that is sent to members on this host without a copy, whole or in part.

        It lies in shared memory if it has at least 64 KiB and `shared_memory_bytes` is not used up, else in ordinary memory. It may be
        changed when its `send` is complete: the receiver has taken the data. A payload of `start_send_message` must not be changed any
        more, because its receivers may read it at any time. The memory is used again when all tensors that use it here are dropped and all
        receivers have released it. A tensor of more than 64 MiB is copied when it is sent.
        """
        return self._segments.allocate(shape, dtype)

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
        generation: int = 0,
        verify_collectives: bool | None = None,
    ) -> World:
        """Join a world and wait until all its members have joined. Members may start in any order.

        Args:
            rank, world_size: this member's rank and the number of members. Rank 0 listens on `addr`:`port`; the others connect.
            backend: with "multiworld" the library's own connections carry all operations, and CUDA tensors are copied through host
                memory. With "nccl" or "cpu:multiworld,cuda:nccl", NCCL carries the collectives on CUDA tensors. "gloo" and "tcp" are
                other names of "multiworld".
            port: -1 means 29500. Many worlds may share a port. To use a free port, call `listen` and pass the port that it returns; with 0,
                rank 0 opens a free port that is not reported.
            timeout: seconds that forming the world may take.
            device: the CUDA device that NCCL uses; its tensors must be on it. Without an index the caller's current device. NCCL is
                experimental.
            generation: the generation of the world to join; 0 means the next one that rank 0 opens.
            verify_collectives: overrides the manager's setting unless None. Must be the same at all members.
        Raises:
            WorldExistsError: a world of that name is open here.
            JoinError: the world did not form in time, or rank 0 refused us.
            BrokenWorldException: a member was lost while the world formed.
            OSError, RuntimeError: rank 0 cannot listen on `addr`:`port`; no thread is available.
            ValueError: invalid rank, size, port or backend.
        After an error everything is freed and the name can be used again.
        """
        config = WorldConfig(
            name=world_name,
            rank=rank,
            size=world_size,
            generation=generation,
            device=check_nccl_device(device) if uses_nccl(backend) else None,
            addr=addr,
            port=DEFAULT_PORT if port == -1 else port,
            secret=self._secret,
            heartbeat=self._heartbeat,
            timeout_s=timeout,
            verify_collectives=self._verify_collectives if verify_collectives is None else verify_collectives,
            bind_host=self._bind_host,
            segments=self._segments,
        )
        host = await listening_address(config) if rank == 0 else ""
        with self._lock:
            world = self._create_world(config, host)
        try:
            await world.open()
        except BaseException:
            world.close()
            self._release()
            raise
        return world

    def _create_world(self, config: WorldConfig, host: str) -> World:
        """Create a world and, at rank 0, listen on `host`. Call it under the lock. Raises WorldExistsError, OSError, RuntimeError."""
        known = self._worlds.get(config.name)
        if known is not None and not known.state.ended:
            raise WorldExistsError(config.name, f"already {known.state} here; remove it first or choose another name")
        acceptor = None
        if config.rank == 0:
            acceptor = self._listeners.open(self._running_loop(), host, config.port)
            config = replace(config, generation=self._next_generation(config))
        if config.size > 1:
            config = replace(config, local_acceptor=self._listeners.open_local(self._running_loop()))
        control_loop = self._running_loop()
        world = self._worlds[config.name] = World(config, control_loop, acceptor, self._on_world_changed)
        self._created.add(world)
        # Programs may use a new name for every job.
        for name in [name for name, each in self._worlds.items() if each.state.ended][:-_MAX_ENDED]:
            del self._worlds[name]
        if self._heartbeat.loop_stall_timeout_s is not None:
            control_loop.loop_counter.register(asyncio.get_running_loop(), self._heartbeat.interval_s)
        return world

    def _next_generation(self, config: WorldConfig) -> int:
        """Return the generation of a new world: the requested one, else one more than the latest of its name.

        A name that is not remembered starts at 1, as it does when this process is replaced: see `Hello.formation`.
        """
        latest = self._generations.pop(config.name, 0)
        generation = config.generation or latest + 1
        self._generations[config.name] = max(generation, latest)
        if len(self._generations) > _MAX_GENERATIONS:
            del self._generations[next(iter(self._generations))]  # the oldest
        return generation

    def set_accepted_secrets(self, *secrets: bytes) -> None:
        """Accept new members and queries only from processes that know one of `secrets`. Existing connections stay open.

        To change the secret without an interruption: accept the old and the new one, change the other processes to the new one, then
        accept only the new one. When this process connects to another one, it still uses the `secret` of the constructor.
        """
        if not secrets:
            raise ValueError("set_accepted_secrets needs at least one secret")
        self._listeners.secrets[:] = secrets

    def listen(self, addr: str = "127.0.0.1", port: int = 0, sock: socket.socket | None = None) -> int:
        """Open a port for worlds and queries, and keep it open until the cleanup. Port 0 lets the kernel choose.

        Args:
            sock: a TCP socket that listens on `addr`:`port` already; closed at the cleanup.
        Returns the port. Raises OSError.
        """
        host = listening_host(addr)
        with self._lock:
            acceptor = self._listeners.open(self._running_loop(), host, port, sock)
            acceptor.keep_open = True
            return acceptor.port

    def answer(self, addr: str, port: int, answerer: Answerer) -> None:
        """Answer the queries of `ask` on an open port with `answerer`, on the running event loop. Raises KeyError if it is not open."""
        self._listeners.acceptors[listening_host(addr), port].answerer = answerer, asyncio.get_running_loop()

    def _running_loop(self) -> ControlLoop:
        if self._control_loop is None:
            control_loop = ControlLoop()
            control_loop.start()
            self._control_loop = control_loop
            _open_managers.add(self)
        return self._control_loop

    # -- ending --------------------------------------------------------------------------------------------------------------

    def _on_world_changed(self, world: World) -> None:
        """Publish the state change of a world, and release an ended one. Callable from any thread."""
        failure = world.failure
        if world.state is WorldState.READY:
            self._events.publish(WorldEvent("joined", world.name, world.generation))
        elif world.state is WorldState.BROKEN and failure is not None:
            self._events.publish(WorldEvent("broken", world.name, world.generation, failure.cause, failure.rank))
        else:
            self._events.publish(WorldEvent("closed", world.name, world.generation))
        if world.state.ended:
            self._release()

    def _release(self) -> None:
        """A world has ended: its port is closed if no other world uses it. Takes no lock, because the caller may be the control loop."""
        control_loop = self._control_loop
        if control_loop is not None:
            control_loop.call_soon(self._close_idle_acceptors, control_loop)

    def _close_idle_acceptors(self, control_loop: ControlLoop) -> None:
        """Close the ports that no world uses. Runs on the control loop's thread.

        Under the lock, so that another caller finds the port open or free. Retries later while another thread holds the lock: it may be
        waiting for a folder or a thread, and the control loop serves all worlds.
        """
        if not self._lock.acquire(blocking=False):
            control_loop.loop.call_later(_RETRY_S, self._close_idle_acceptors, control_loop)
            return
        try:
            if self._control_loop is not control_loop:
                return
            self._listeners.close_unused({world.acceptor for world in self._worlds.values() if not world.state.ended})
        finally:
            self._lock.release()

    def remove_world(self, world_name: str) -> None:
        """Close a world and remove its name. Its resources are freed in the background; `close_world` waits for that.

        A world that another thread opens under the same name in the meantime is not affected. Raises WorldNotFoundError.
        """
        self._drop(self.world(world_name))

    async def close_world(self, world_name: str) -> None:
        """Like `remove_world`, but wait at most 10 s until all its resources are freed. Raises WorldNotFoundError."""
        world = self.world(world_name)
        self._drop(world)
        for pause_s in _pauses(world.reclaimed.is_set, _CLEANUP_S):
            await asyncio.sleep(pause_s)

    def _drop(self, world: World) -> None:
        """Close this world, and remove its name if no other world has it by now. Idempotent."""
        world.close()
        with self._lock:
            if self._worlds.get(world.name) is world:
                del self._worlds[world.name]

    async def aclose(self) -> None:
        """Like `cleanup`, without blocking the event loop."""
        for pause_s in self._close_all():
            await asyncio.sleep(pause_s)

    def cleanup(self) -> None:
        """Close all worlds and listeners and free threads, sockets and memory. Blocks for at most about 15 s.

        Idempotent. The manager can be used again afterwards. Resources that were not freed in time are logged as an error.
        """
        for pause_s in self._close_all():
            time.sleep(pause_s)

    def _close_all(self) -> Iterator[float]:
        """Close everything. Yields the pauses to make meanwhile."""
        with self._lock:
            worlds, self._worlds = {*self._created}, {}
            control_loop, self._control_loop = self._control_loop, None
            acceptors = self._listeners.clear()
        for world in worlds:
            world.close()
        yield from _pauses(lambda: all(world.reclaimed.is_set() for world in worlds), _CLEANUP_S)
        for world in worlds:
            if not world.reclaimed.is_set():
                logger.error("%r was not freed within %.0f s", world, _CLEANUP_S)
        if control_loop is not None:
            for acceptor in acceptors:
                control_loop.call_soon(acceptor.close)
            control_loop.stop(0.0)
            yield from _pauses(lambda: not control_loop.running, _CONTROL_LOOP_S)
        self._segments.close()
        self._events.publish(None)
        _open_managers.discard(self)


def _pauses(done: Callable[[], bool], timeout_s: float) -> Iterator[float]:
    """Yield pauses in seconds until `done()` is true, or for `timeout_s`.

    It polls, because a thread to wait on may not be available when the process is short of memory.
    """
    pause_s, until_s = 0.001, time.monotonic() + timeout_s
    while not done() and time.monotonic() < until_s:
        yield pause_s
        pause_s = min(2 * pause_s, 0.05)


_open_managers: weakref.WeakSet[WorldManager] = weakref.WeakSet()

# A forked child has no threads that serve worlds, and must not close the worlds of its parent.
os.register_at_fork(after_in_child=_open_managers.clear)


@atexit.register
def _cleanup_all() -> None:
    """Clean up at process exit. The interpreter would abort if threads were still inside c10d."""
    for manager in list(_open_managers):
        manager.cleanup()
