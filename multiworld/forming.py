"""How a world forms: its members meet at rank 0, connect their lines, and build the group that its collectives need."""

import asyncio
import socket
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch._C._distributed_c10d import ProcessGroup, Store

from multiworld.errors import Cause, JoinError, WorldError
from multiworld.handshake import Hello
from multiworld.meeting import Meeting
from multiworld.membership import Address, Membership
from multiworld.process_group import LINES, make_process_group
from multiworld.reception import Reception
from multiworld.rendezvous import Roster, Watch, WatchedWorld
from multiworld.store import LifelineStore
from multiworld.watchdog import WatchDog
from multiworld.world_config import WorldConfig

_BUILDER_S = 1.0
"""How long to wait for the group's constructor: woken in milliseconds, unless it waits for a frozen member's connection."""
_RESOLVE_RETRY_S = 0.5

AnyWatch = TypeVar("AnyWatch", bound=Watch)

builders: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""The threads that build, or built, the groups of this process's worlds."""


class FormingWorld(WatchedWorld, Protocol):
    """What forming asks of its world."""

    epoch: int

    def ending(self) -> WorldError | None:
        """What ended it; None while it lives. A fresh error each time."""

    def break_(self, cause: Cause, rank: int, detail: str = "") -> None: ...

    def be_watched(self, make_watch: Callable[[], AnyWatch]) -> AnyWatch | None:
        """Be watched by what this makes from now on. None, and nothing is made, when the world has ended."""

    def adopt(self, group: ProcessGroup, take_socks: Callable[[], dict[int, socket.socket]]) -> None:
        """Be ready, with this group and the connections of the lines, by rank. Raises OSError; what ended the world, and takes none."""


class Forming:
    """One member's part in it. What is not said to be otherwise runs on the loop that awaits `run`.

    Attributes:
        meeting: what connects the lines of a world that needs some, once it is known where to.
    """

    def __init__(
        self,
        world: FormingWorld,
        config: WorldConfig,
        watchdog: WatchDog,
        reception: Reception | None,
        store: LifelineStore,
    ) -> None:
        self.meeting: Meeting | None = None
        self._world = world
        self._config = config
        self._watchdog = watchdog
        self._reception = reception
        self._store = store
        self._watch: Watch | None = None
        self._refusal = "nobody answered"
        self._all_here = False
        self._host_addr = config.addr
        self._step: asyncio.Future[Any] | None = None
        self._builder: threading.Thread | None = None

    async def run(self) -> None:
        """See `World.open`."""
        config, world = self._config, self._world
        try:
            # No local name for the timeout: it knows its task, and a task that is cancelled keeps, out of the sight of Python 3.11's
            # garbage collector, the error whose traceback has this frame.
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
        except Exception as error:
            world.break_(Cause.TRANSPORT, -1, str(error))
            raise JoinError(config.name, f"the process group could not be built: {error}") from error

    def _obstacle(self) -> str:
        if self._all_here:
            return "all members came, but their connections did not form"
        if isinstance(self._watch, Roster):
            return f"ranks {', '.join(map(str, self._watch.missing()))} did not come"
        return self._refusal

    # -- steps, which whatever ends the world wakes ----------------------------------------------------------------------------

    def _await(self) -> asyncio.Future[Any]:
        self._step = step = asyncio.get_running_loop().create_future()
        step.add_done_callback(lambda done: done.cancelled() or done.exception())  # may go unread
        if error := self._world.ending():
            raise error
        return step

    def wake(self, result: str | None = None, *, error: BaseException | None = None) -> bool:
        """End the step that is awaited, from any thread. False when its event loop has ended."""
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

    # -- taking a seat -----------------------------------------------------------------------------------------------------------

    @property
    def _seat(self) -> Hello:
        return Hello(self._config.name, self._config.rank, self._config.size, self._world.epoch)

    async def _take_seat(self) -> str:
        """Gives our own address as the others reach it."""
        seated = self._await()
        if self._config.rank == 0:
            self._watchdog.call_soon(self._host)
        else:
            self._watchdog.call_soon(self._join, await self._resolve())
        return await seated or self._config.addr

    async def _resolve(self) -> list[Address]:
        """The host's addresses; a name that is not known yet (a container that has not started) is asked for again."""
        loop, config = asyncio.get_running_loop(), self._config
        while True:
            try:
                found = await loop.getaddrinfo(config.addr, config.port, type=socket.SOCK_STREAM)
                return [Address(family, (str(sockaddr[0]), config.port)) for family, *_, sockaddr in found]
            except OSError as error:
                self._refusal = f"{config.addr} cannot be resolved: {error.strerror}"
                await asyncio.sleep(_RESOLVE_RETRY_S)

    def _host(self) -> None:
        """On the watchdog's thread."""
        assert self._reception is not None
        self._watch = roster = self._world.be_watched(
            lambda: Roster(self._watchdog, self._world, self._seat, self._config.pulse)
        )
        if roster is None:
            return
        self._prepare_meeting()
        if self.meeting is not None:
            self.meeting.attend(self._reception)
        self._reception.host(roster)
        self._end_if_late()

    def _join(self, addresses: list[Address]) -> None:
        """On the watchdog's thread."""
        config = self._config
        self._watch = self._world.be_watched(
            lambda: Membership(
                self._watchdog, self._world, self._seat, config.pulse, config.secret, addresses, config.bind_host
            )
        )

    def on_all_here(self, host_addr: str | None, local_host: str) -> None:
        """All members have a seat. On the watchdog's thread.

        Args:
            host_addr: where rank 0 has been reached; None at rank 0.
            local_host: our own address as the others reach it.
        """
        self._all_here = True
        if host_addr is not None:
            self._host_addr = host_addr
            self._prepare_meeting()
            self._end_if_late()
        self.wake(local_host)

    def on_refused(self, reason: str, *, final: bool) -> None:
        """The host will not have us. On the watchdog's thread."""
        config = self._config
        self._refusal = reason
        if final:
            self.wake(error=JoinError(config.name, f"rank 0 at {config.addr}:{config.port} refused us: {reason}"))

    def _prepare_meeting(self) -> None:
        """On the watchdog's thread, before any member may call."""
        config = self._config
        if config.size > 1 and ("gloo" in config.backends.values() or not config.backends):
            self.meeting = Meeting(self._watchdog, self._seat, config.secret, config.pulse, config.bind_host)

    def _end_if_late(self) -> None:
        """The world may have ended just before there was a meeting to be ended with it."""
        if self._world.ending() is not None:
            self.end()

    # -- building the group ------------------------------------------------------------------------------------------------------

    async def _build(self, host: str) -> None:
        """Run the group's constructor, which blocks until all ranks are there, on a thread that nobody has to wait for."""
        built = self._await()

        def build() -> None:
            error: BaseException | None = None
            try:
                group = self._make_group(host)
                self._world.adopt(group, self.meeting.take if self.meeting is not None else dict)
            except Exception as failure:  # noqa: BLE001 - handed to the caller, whatever it is
                error = self._world.ending() or failure.with_traceback(None)
            if not self.wake(error=error):
                self._world.break_(Cause.ABORTED, self._config.rank, "the event loop ended while joining")

        builder = threading.Thread(target=build, name=f"multiworld-{self._config.name}-join", daemon=True)
        builder.start()
        self._builder = builder  # one that could not start cannot be joined either
        builders.add(builder)
        await built

    def _make_group(self, host: str) -> ProcessGroup:
        """Blocks until all ranks are there. Raises RuntimeError, JoinError."""
        config = self._config
        store = config.store or self._store
        self._agree_on_mode(store)
        if self.meeting is not None:
            self.meeting.gather(self._store, host, (self._host_addr, config.port), config.timeout_s)
        return make_process_group(
            store, config.rank, config.size, config.backends, host, config.timeout_s, config.device
        )

    def _agree_on_mode(self, store: Store) -> None:
        """Members that were told different things would wait for each other in vain. Raises JoinError."""
        config = self._config
        backends = ",".join(f"{device}:{name}" for device, name in sorted(config.backends.items()))
        mode = f"{'checked' if config.checked else 'unchecked'} with backend {backends or LINES}"
        if config.rank == 0:
            store.set("mode", mode)
        elif (theirs := store.get("mode").decode(errors="replace")) != mode:
            raise JoinError(config.name, f"rank 0 is {theirs}, we are {mode}")

    # -- ending (on the world's reclaiming thread) -------------------------------------------------------------------------------

    def end(self) -> None:
        """Wake whatever still waits for members."""
        if self.meeting is not None:
            self.meeting.end()

    def join_builder(self) -> None:
        """Wait a moment for the constructor to come back."""
        if self._builder is not None and self._builder is not threading.current_thread():
            self._builder.join(_BUILDER_S)

    def forget(self) -> None:
        """Let go of what may hold errors: their tracebacks have the world before us, and so on."""
        self._step = self._watch = None
