"""Forms a world: its members join at rank 0, connect to each other, and build the process group for the collectives."""

import asyncio
import os
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store

from multiworld.config import WorldConfig
from multiworld.control.handshake import Hello
from multiworld.control.loop import WatchDog
from multiworld.errors import Cause, JoinError, WorldError
from multiworld.execution.failures import ConnectionLostError, described, lost_connections
from multiworld.execution.process_group import NCCL, make_process_group
from multiworld.execution.threads import DaemonThread
from multiworld.membership.acceptor import Acceptor
from multiworld.membership.member import Address, MemberSession
from multiworld.membership.mesh import MeshConnector
from multiworld.membership.monitor import HostSession, MembershipMonitor, MonitoredWorld
from multiworld.membership.store import ControlStore

_BUILDER_S = 1.0
"""How long to wait for the group's constructor after an abort. It takes milliseconds, unless a connection to a frozen member is pending."""
_RESOLVE_RETRY_S = 0.5
_PREFIX_KEY = "multiworld/prefix"

AnyMonitor = TypeVar("AnyMonitor", bound=MembershipMonitor)

builders: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""The threads that build, or have built, process groups of this process. At exit, multiworld/manager.py waits for them."""


class BootstrapWorld(MonitoredWorld, Protocol):
    """The part of a world that `Bootstrap` uses."""

    epoch: int

    def ending(self) -> WorldError | None:
        """Return a new error that says why the world ended; None while it has not ended."""

    def break_(self, cause: Cause, rank: int, detail: str = "") -> None: ...

    def be_watched(self, make_watch: Callable[[], AnyMonitor]) -> AnyMonitor | None:
        """Create the world's monitor and return it. If the world has ended, create nothing and return None."""

    def adopt(self, group: ProcessGroup, take_socks: Callable[[], dict[int, socket.socket]]) -> None:
        """Make the world ready, with this group and the data connections by rank.

        Raises OSError. Raises the world's error if it has ended; `take_socks` is not called then.
        """


class Bootstrap:
    """One member's part in forming a world. Methods run on the event loop that awaits `run`, unless they say otherwise.

    Attributes:
        meeting: connects to the other members. None before the address of rank 0 is known, and in a world that needs no data connections
            (one member, or NCCL only).
    """

    def __init__(
        self,
        world: BootstrapWorld,
        config: WorldConfig,
        watchdog: WatchDog,
        reception: Acceptor | None,
        store: ControlStore,
    ) -> None:
        self.meeting: MeshConnector | None = None
        self._world = world
        self._config = config
        self._watchdog = watchdog
        self._reception = reception
        self._store = store
        self._watch: MembershipMonitor | None = None
        self._refusal = "nobody answered"
        self._all_here = False
        self._host_addr = config.addr
        self._step: asyncio.Future[Any] | None = None
        self._builder: threading.Thread | None = None

    async def run(self) -> None:
        """See `World.open`."""
        config, world = self._config, self._world
        try:
            # No local name for the timeout. It refers to its task; a cancelled task holds its error, whose traceback holds this frame; and
            # Python 3.11's garbage collector does not find this cycle.
            async with asyncio.timeout(config.timeout_s):
                host = await self._take_seat()
                await self._build(host)
        except asyncio.CancelledError:
            world.break_(Cause.ABORTED, config.rank, "cancelled while joining")
            raise
        except TimeoutError:
            obstacle = self._obstacle()
            world.break_(Cause.TIMEOUT, -1, "did not form in time")
            raise JoinError(
                config.name,
                f"did not form within {config.timeout_s:g} s as rank {config.rank} of {config.size} at "
                f"{config.addr}:{config.port}: {obstacle}",
            ) from None
        except WorldError:
            raise
        except ConnectionLostError as error:
            world.break_(Cause.TRANSPORT, -1, str(error))
            raise JoinError(config.name, f"the process group could not be built: {error}") from error
        except Exception as error:
            world.break_(Cause.LOCAL, config.rank, described(error))
            raise JoinError(config.name, f"the process group could not be built: {error}") from error

    def _obstacle(self) -> str:
        if self._all_here:
            return "all members came, but their connections did not form"
        if isinstance(self._watch, HostSession):
            return f"ranks {', '.join(map(str, self._watch.missing()))} did not come"
        return self._refusal

    # -- the awaited step; the end of the world wakes it -----------------------------------------------------------------------

    def _await(self) -> asyncio.Future[Any]:
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
    def _seat(self) -> Hello:
        return Hello(self._config.name, self._config.rank, self._config.size, self._world.epoch)

    async def _take_seat(self) -> str:
        """Join at rank 0 and wait until all ranks have joined. Returns our own address as the others reach it."""
        seated = self._await()
        if self._config.rank == 0:
            self._watchdog.call_soon(self._host)
        else:
            self._watchdog.call_soon(self._join, await self._resolve())
        return await seated or self._config.addr

    async def _resolve(self) -> list[Address]:
        """Return the addresses of rank 0. Retries while the name cannot be resolved, for example because its container has not started."""
        loop, config = asyncio.get_running_loop(), self._config
        while True:
            try:
                found = await loop.getaddrinfo(config.addr, config.port, type=socket.SOCK_STREAM)
                return [Address(family, (str(sockaddr[0]), config.port)) for family, *_, sockaddr in found]
            except OSError as error:
                self._refusal = f"{config.addr} cannot be resolved: {error.strerror}"
                await asyncio.sleep(_RESOLVE_RETRY_S)

    def _host(self) -> None:
        """Admit the other ranks. Runs on the control loop's thread, at rank 0."""
        assert self._reception is not None
        self._watch = roster = self._world.be_watched(
            lambda: HostSession(self._watchdog, self._world, self._seat, self._config.pulse)
        )
        if roster is None:
            return
        self._prepare_meeting()
        if self.meeting is not None:
            self.meeting.attend(self._reception)
        self._reception.host(roster)
        self._end_if_late()

    def _join(self, addresses: list[Address]) -> None:
        """Connect to rank 0. Runs on the control loop's thread, at the other ranks."""
        config = self._config
        self._watch = self._world.be_watched(
            lambda: MemberSession(
                self._watchdog, self._world, self._seat, config.pulse, config.secret, addresses, config.bind_host
            )
        )

    def on_all_here(self, host_addr: str | None, local_host: str) -> None:
        """All ranks have joined. Called on the control loop's thread.

        Args:
            host_addr: the address at which this member reached rank 0; None at rank 0.
            local_host: our own address as the others reach it.
        """
        self._all_here = True
        if host_addr is not None:
            self._host_addr = host_addr
            self._prepare_meeting()
            self._end_if_late()
        self.wake(local_host)

    def on_refused(self, reason: str, *, final: bool) -> None:
        """Joining failed. Unless `final`, the monitor retries. Called on the control loop's thread."""
        config = self._config
        self._refusal = reason
        if final:
            self.wake(error=JoinError(config.name, f"rank 0 at {config.addr}:{config.port} refused us: {reason}"))

    def _prepare_meeting(self) -> None:
        """Create the mesh connector if the world needs data connections. Runs on the control loop's thread, before a member may connect."""
        config = self._config
        if config.size > 1 and set(config.backends.values()) != {NCCL}:
            self.meeting = MeshConnector(self._watchdog, self._seat, config.secret, config.pulse, config.bind_host)

    def _end_if_late(self) -> None:
        """End the mesh connector if the world ended before it was created."""
        if self._world.ending() is not None:
            self.end()

    # -- building the group ------------------------------------------------------------------------------------------------------

    async def _build(self, host: str) -> None:
        """Connect to the members and construct the group on a daemon thread, because both block until all ranks take part."""
        built = self._await()

        def build() -> None:
            error: BaseException | None = None
            try:
                group = self._make_group(host)
                self._world.adopt(group, self.meeting.take if self.meeting is not None else dict)
            except Exception as failure:  # noqa: BLE001 - raised to the caller of `run`
                error = self._world.ending() or failure.with_traceback(None)
            if not self.wake(error=error):
                self._world.break_(Cause.ABORTED, self._config.rank, "the event loop ended while joining")

        builder = DaemonThread(build, f"multiworld-{self._config.name}-join")
        builder.start()
        self._builder = builder  # set after the start: a thread that did not start cannot be joined
        builders.add(builder)
        await built

    @lost_connections()
    def _make_group(self, host: str) -> ProcessGroup:
        """Connect to the members and construct the group. Blocks until all ranks take part. Raises ConnectionLostError, JoinError."""
        config = self._config
        self._agree_on_mode()
        store = self._rendezvous_store()
        if self.meeting is not None:
            self.meeting.gather(self._store, host, (self._host_addr, config.port), config.timeout_s)
        return make_process_group(
            store, config.rank, config.size, config.backends, host, config.timeout_s, config.device, self._check
        )

    def _check(self) -> None:
        """Raises the world's error if it has ended."""
        if error := self._world.ending():
            raise error

    def _rendezvous_store(self) -> Store:
        """Return the store of the control connection, or the caller's store with a new prefix.

        The caller's store may hold keys of earlier generations, so rank 0 chooses a random prefix for each one.
        """
        config = self._config
        if config.store is None:
            return self._store
        if config.rank == 0:
            self._store.set(_PREFIX_KEY, os.urandom(8).hex())
        prefix = self._store.get(_PREFIX_KEY).decode(errors="replace")
        return PrefixStore(f"multiworld/{config.name}/{prefix}", config.store)

    def _agree_on_mode(self) -> None:
        """Check that this member's settings equal those of rank 0; otherwise the members would wait for each other. Raises JoinError."""
        config, store = self._config, self._store
        backends = ",".join(f"{device}:{name}" for device, name in sorted(config.backends.items()))
        mode = f"{'checked' if config.checked else 'unchecked'} with backend {backends}"
        if config.store is not None:
            mode += " and a store of its own"
        if config.rank == 0:
            store.set("mode", mode)
        elif (theirs := store.get("mode").decode(errors="replace")) != mode:
            raise JoinError(config.name, f"rank 0 is {theirs}, we are {mode}")

    # -- ending (on the world's teardown thread) ---------------------------------------------------------------------------------

    def end(self) -> None:
        """Stop connecting to members and wake the thread that waits for them."""
        if self.meeting is not None:
            self.meeting.end()

    def join_builder(self) -> None:
        """Wait at most `_BUILDER_S` for the thread that builds the group."""
        if self._builder is not None and self._builder is not threading.current_thread():
            self._builder.join(_BUILDER_S)

    def forget(self) -> None:
        """Drop references that may hold errors, because a traceback can keep earlier worlds alive."""
        self._step = self._watch = None
