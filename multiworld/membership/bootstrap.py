"""Forms a world: its members join at rank 0, connect to each other, and build the process group for the collectives."""

import asyncio
import atexit
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch._C._distributed_c10d import ProcessGroup

from multiworld.config import WorldConfig
from multiworld.control.handshake import Hello
from multiworld.control.loop import ControlLoop
from multiworld.errors import Cause, JoinError, WorldError
from multiworld.execution.failures import ConnectionLostError, described, lost_connections
from multiworld.execution.process_group import NCCL, make_nccl_group
from multiworld.execution.threads import DaemonThread
from multiworld.membership.acceptor import Acceptor
from multiworld.membership.member import Address, MemberSession
from multiworld.membership.mesh import MeshConnector
from multiworld.membership.monitor import HostSession, MembershipMonitor, MonitoredWorld
from multiworld.membership.store import ControlStore

_BUILD_JOIN_S = 1.0
"""How long to wait for the group's constructor after an abort. It takes milliseconds, unless it connects to a frozen member."""
_EXIT_S = 30.0
"""At process exit, how long to wait for groups under construction."""
_RESOLVE_RETRY_S = 0.5

AnyMonitor = TypeVar("AnyMonitor", bound=MembershipMonitor)

_build_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""The threads of this process that build a process group, or have built one."""
os.register_at_fork(after_in_child=_build_threads.clear)  # a forked child does not have these threads


@atexit.register
def _join_build_threads() -> None:
    """Wait for process groups under construction, because the interpreter would abort. Runs after the cleanup of the managers."""
    deadline_s = time.monotonic() + _EXIT_S
    for thread in list(_build_threads):
        thread.join(max(0.0, deadline_s - time.monotonic()))


class BootstrapWorld(MonitoredWorld, Protocol):
    """The part of a world that `Bootstrap` uses."""

    generation: int

    def ending(self) -> WorldError | None:
        """Return a new instance of the error that the world ended with; None while it has not ended."""

    def fail(self, cause: Cause, rank: int, detail: str = "") -> None: ...

    def start_monitor(self, make_monitor: Callable[[], AnyMonitor]) -> AnyMonitor | None:
        """Create the world's monitor and return it. If the world has ended, create nothing and return None."""

    def on_group_ready(self, group: ProcessGroup | None, take_socks: Callable[[], dict[int, socket.socket]]) -> None:
        """Make the world ready, with this group of NCCL and the data connections by rank.

        Raises OSError. Raises the world's error if it has ended; `take_socks` is not called then.
        """


class Bootstrap:
    """Forms a world at one member. Methods run on the event loop that awaits `run`, unless they say otherwise.

    Attributes:
        mesh: connects to the other members. None before the address of rank 0 is known, and in a world that needs no data connections
            (one member, or NCCL only).
    """

    def __init__(
        self,
        world: BootstrapWorld,
        config: WorldConfig,
        control_loop: ControlLoop,
        acceptor: Acceptor | None,
        store: ControlStore,
    ) -> None:
        self.mesh: MeshConnector | None = None
        self._world = world
        self._config = config
        self._control_loop = control_loop
        self._acceptor = acceptor
        self._store = store
        self._monitor: MembershipMonitor | None = None
        self._obstacle = "no answer"
        self._all_joined = False
        self._host_addr = config.addr
        self._formation = os.urandom(8).hex()
        self._step: asyncio.Future[Any] | None = None
        self._build_thread: threading.Thread | None = None

    async def run(self) -> None:
        """See `World.open`."""
        config, world = self._config, self._world
        try:
            # No local name for the timeout. It refers to its task; a cancelled task holds its error, whose traceback holds this frame; and
            # Python 3.11's garbage collector does not find this cycle.
            async with asyncio.timeout(config.timeout_s):
                host = await self._join_members()
                await self._build(host)
        except asyncio.CancelledError:
            world.fail(Cause.ABORTED, config.rank, "cancelled while joining")
            raise
        except TimeoutError:
            obstacle = self._describe_obstacle()
            world.fail(Cause.TIMEOUT, -1, "did not form in time")
            raise JoinError(
                config.name,
                f"did not form within {config.timeout_s:g} s as rank {config.rank} of {config.size} at "
                f"{config.addr}:{config.port}: {obstacle}",
            ) from None
        except WorldError:
            raise
        except ConnectionLostError as error:
            world.fail(Cause.TRANSPORT, -1, str(error))
            raise JoinError(config.name, f"the process group could not be built: {error}") from error
        except Exception as error:
            world.fail(Cause.LOCAL, config.rank, described(error))
            raise JoinError(config.name, f"the process group could not be built: {error}") from error

    def _describe_obstacle(self) -> str:
        if self._all_joined:
            return "all members joined, but their connections did not form"
        if isinstance(self._monitor, HostSession):
            return f"ranks {', '.join(map(str, self._monitor.missing()))} did not join"
        return self._obstacle

    # -- the awaited step; the end of the world wakes it -----------------------------------------------------------------------

    def _begin_step(self) -> asyncio.Future[Any]:
        self._step = step = asyncio.get_running_loop().create_future()
        step.add_done_callback(lambda done: done.cancelled() or done.exception())  # no warning if it is never awaited
        if error := self._world.ending():
            raise error
        return step

    def wake(self, result: str | None = None, *, error: BaseException | None = None) -> bool:
        """Complete the awaited step with `result` or `error`. Callable from any thread. Returns False when its event loop is closed."""
        step = self._step
        if step is None:
            return True

        def resolve() -> None:
            if step.done():
                return
            if error is None:
                step.set_result(result)
            else:
                step.set_exception(error)

        try:
            step.get_loop().call_soon_threadsafe(resolve)
        except RuntimeError:
            return False
        return True

    # -- joining -----------------------------------------------------------------------------------------------------------------

    @property
    def _member(self) -> Hello:
        config = self._config
        formation = self._formation if config.rank == 0 else ""
        return Hello(config.name, config.rank, config.size, self._world.generation, formation=formation)

    async def _join_members(self) -> str:
        """Join at rank 0 and wait until all ranks have joined. Returns our own address as the others reach it."""
        joined = self._begin_step()
        if self._config.rank == 0:
            self._control_loop.call_soon(self._start_host_session)
        else:
            self._control_loop.call_soon(self._start_member_session, await self._resolve())
        return await joined or self._config.addr

    async def _resolve(self) -> list[Address]:
        """Return the addresses of rank 0. Retries while the name cannot be resolved, for example because its container has not started."""
        loop, config = asyncio.get_running_loop(), self._config
        while True:
            try:
                found = await loop.getaddrinfo(config.addr, config.port, type=socket.SOCK_STREAM)
                return [Address(family, (str(sockaddr[0]), config.port)) for family, *_, sockaddr in found]
            except OSError as error:
                self._obstacle = f"{config.addr} cannot be resolved: {error.strerror}"
                await asyncio.sleep(_RESOLVE_RETRY_S)

    def _start_host_session(self) -> None:
        """Admit the other ranks. Runs on the control loop's thread, at rank 0."""
        assert self._acceptor is not None
        self._monitor = session = self._world.start_monitor(
            lambda: HostSession(self._control_loop, self._world, self._member, self._config.heartbeat)
        )
        if session is None:
            return
        self._create_mesh()
        if self.mesh is not None:
            self.mesh.accept_on(self._acceptor)
        self._acceptor.add_session(session)
        self._close_mesh_if_ended()

    def _start_member_session(self, addresses: list[Address]) -> None:
        """Connect to rank 0. Runs on the control loop's thread, at the other ranks."""
        config = self._config
        self._monitor = self._world.start_monitor(
            lambda: MemberSession(
                self._control_loop,
                self._world,
                self._member,
                config.heartbeat,
                config.secret,
                addresses,
                config.bind_host,
            )
        )

    def on_all_joined(self, host_addr: str | None, local_host: str) -> None:
        """All ranks have joined. Called on the control loop's thread.

        Args:
            host_addr: the address at which this member reached rank 0; None at rank 0.
            local_host: our own address as the others reach it.
        """
        self._all_joined = True
        if host_addr is not None:
            self._host_addr = host_addr
            self._create_mesh()
            self._close_mesh_if_ended()
        self.wake(local_host)

    def on_join_failed(self, reason: str, *, final: bool) -> None:
        """Joining failed. Unless `final`, the monitor retries. Called on the control loop's thread."""
        config = self._config
        self._obstacle = reason
        if final:
            self.wake(error=JoinError(config.name, f"rank 0 at {config.addr}:{config.port} refused us: {reason}"))

    def _create_mesh(self) -> None:
        """Create the mesh connector if the world needs data connections. Runs on the control loop's thread, before a member may connect."""
        config = self._config
        if config.size > 1 and set(config.backends.values()) != {NCCL}:
            self.mesh = MeshConnector(
                self._control_loop,
                self._member,
                config.secret,
                config.heartbeat,
                config.bind_host,
                config.local_acceptor,
            )

    def _close_mesh_if_ended(self) -> None:
        """Close the mesh connector if the world ended before it was created."""
        if self._world.ending() is not None:
            self.close_mesh()

    # -- building the group ------------------------------------------------------------------------------------------------------

    async def _build(self, host: str) -> None:
        """Connect to the members and construct the group on a daemon thread, because both block until all ranks take part."""
        built = self._begin_step()

        def build() -> None:
            error: BaseException | None = None
            try:
                group = self._make_group(host)
                self._world.on_group_ready(group, self.mesh.take if self.mesh is not None else dict)
            except Exception as failure:  # noqa: BLE001 - raised to the caller of `run`
                error = self._world.ending() or failure.with_traceback(None)
            if not self.wake(error=error):
                self._world.fail(Cause.ABORTED, self._config.rank, "the event loop ended while joining")

        thread = DaemonThread(build, f"multiworld-{self._config.name}-join")
        thread.start()
        self._build_thread = thread  # set after the start: a thread that did not start cannot be joined
        _build_threads.add(thread)
        await built

    @lost_connections()
    def _make_group(self, host: str) -> ProcessGroup | None:
        """Connect to the members, and construct the group of a world with NCCL. Blocks until all ranks take part.

        Raises ConnectionLostError, JoinError.
        """
        config = self._config
        self._check_settings_match()
        if self.mesh is not None:
            self.mesh.formation = self._store.get("formation").decode(errors="replace")
            self.mesh.connect_all(self._store, host, (self._host_addr, config.port), config.timeout_s)
        if config.device is None:
            return None
        return make_nccl_group(self._store, config.rank, config.size, config.device, self._check)

    def _check(self) -> None:
        """Raises the world's error if it has ended."""
        if error := self._world.ending():
            raise error

    def _check_settings_match(self) -> None:
        """Check that this member's settings equal those of rank 0; otherwise the members would wait for each other. Raises JoinError."""
        config, store = self._config, self._store
        backends = ",".join(f"{device}:{name}" for device, name in sorted(config.backends.items()))
        ours = f"backend={backends}, verify_collectives={config.verify_collectives}"
        if config.rank == 0:
            store.set("settings", ours)
            store.set("formation", self._formation)
        elif (theirs := store.get("settings").decode(errors="replace")) != ours:
            raise JoinError(config.name, f"the settings differ: rank 0 has {theirs}; we have {ours}")

    # -- ending (on the world's teardown thread) ---------------------------------------------------------------------------------

    def close_mesh(self) -> None:
        """Stop connecting to members and wake the thread that waits for them."""
        if self.mesh is not None:
            self.mesh.close()

    def join_build_thread(self) -> None:
        """Wait at most `_BUILD_JOIN_S` for the thread that builds the group."""
        if self._build_thread is not None and self._build_thread is not threading.current_thread():
            self._build_thread.join(_BUILD_JOIN_S)

    def drop_references(self) -> None:
        """Drop references that may hold errors, because a traceback can keep earlier worlds alive."""
        self._step = self._monitor = None
