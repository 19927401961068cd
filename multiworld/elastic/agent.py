"""Performs the actions of a member's `MemberState` from join to leave, independently of the application's calls.

All code here runs on the event loop on which the member joined. The threads of the `WorldManager` form worlds and send heartbeats.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from multiworld.control.query import ask
from multiworld.elastic.errors import DesyncError, ElasticError, EvictedError, RendezvousError, ViewChangeError
from multiworld.elastic.protocol.member_state import (
    Action,
    CloseView,
    EndBoundary,
    EndMembership,
    EndReason,
    FormView,
    MemberState,
    Send,
    ViewReady,
)
from multiworld.elastic.protocol.messages import Evicted, MemberInfo, MessageError, View
from multiworld.elastic.rendezvous_link import RendezvousLink
from multiworld.errors import AskError, BrokenWorldException, Cause, WorldError
from multiworld.manager import WorldManager
from multiworld.texts import shown

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
"""Seconds that one attempt to connect to the rendezvous server may take."""
_RETRY_PAUSE_S = 0.2
"""Seconds between two attempts to connect to the rendezvous server."""
_FLUSH_TIMEOUT_S = 1.0
"""Seconds that `close` waits until the queued messages are sent."""
_SUSPECT_CAUSES = frozenset((Cause.EXIT, Cause.HANG, Cause.STALLED, Cause.TRANSPORT, Cause.LOCAL))
"""Causes that make the failed rank a suspect. LOCAL counts because a member that fails locally reports it to the others."""
_ERRORS: dict[EndReason, type[ElasticError]] = {
    "left": ElasticError,
    "evicted": EvictedError,
    "rendezvous": RendezvousError,
    "view_change": ViewChangeError,
    "desync": DesyncError,
}


@dataclass(frozen=True, slots=True)
class MemberConfig:
    """Settings of one member.

    Attributes:
        addr, port: address of the rendezvous server.
        secret: the secret of the rendezvous server.
        host: address at which the other members reach this process; "" uses the local address of the route to the rendezvous server.
        form_timeout_s: seconds that one attempt to form the world of a view may take.
        view_change_timeout_s: seconds to wait for the next view, failed attempts included; also seconds to try to reach the
            rendezvous after the connection to it is lost.
    """

    addr: str
    port: int
    secret: bytes | str
    host: str
    form_timeout_s: float
    view_change_timeout_s: float


class MemberAgent:
    """Runs one membership: the connection to the rendezvous server and the formation of each view's world.

    Attributes:
        state: the state of this member.
        error: why this process is no longer a member; None while it is one.
    """

    def __init__(self, manager: WorldManager, world_name: str, config: MemberConfig) -> None:
        self.state = MemberState(os.urandom(8).hex())
        self.error: ElasticError | None = None
        self._manager = manager
        self._name = world_name
        self._config = config
        self._member = MemberInfo(self.state.id, "", 0)
        self._link: RendezvousLink | None = None
        self._changed = asyncio.Event()
        self._boundary: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._forming: asyncio.Task[None] | None = None

    # -- for the application -------------------------------------------------------------------------------------------

    async def join(self, timeout_s: float) -> None:
        """Register at the rendezvous server and wait for the first view that includes this member. Raises ElasticError, OSError."""
        config = self._config
        try:
            async with asyncio.timeout(timeout_s):
                # In threads, because names may have to be resolved.
                host = config.host or await asyncio.to_thread(_local_host, config.addr, config.port)
                port = await asyncio.to_thread(self._manager.listen, host)
                self._member = MemberInfo(self.state.id, host, port)
                self._spawn(self._watch_world())
                self._link = await self._connect_with_retry(timeout_s)
                self._spawn(self._receive_messages())
                await self._wait_for_view(0)
        except TimeoutError:
            detail = f"no view included this member within {timeout_s:g} s: too few members joined, or the others were not at a boundary"
            raise ViewChangeError(self._name, detail) from None
        except PermissionError as error:
            raise RendezvousError(self._name, str(error)) from error
        self.raise_if_ended()

    async def next_view(self, after: int) -> View:
        """Wait until a view later than `after` is ready and return it.

        Raises ElasticError when this process is no longer a member. After `view_change_timeout_s` the member leaves with ViewChangeError.
        """
        try:
            async with asyncio.timeout(self._config.view_change_timeout_s):
                await self._wait_for_view(after)
        except TimeoutError:
            detail = f"no view after {after} formed within {self._config.view_change_timeout_s:g} s"
            self.leave("view_change", detail)
        self.raise_if_ended()
        return self.state.view

    async def _wait_for_view(self, after: int) -> None:
        """Wait until a view later than `after` is ready, or this process is no longer a member."""
        while self.error is None and not (self.state.view.number > after and self.state.is_in(self.state.view.number)):
            self._changed.clear()
            await self._changed.wait()

    async def wait_at_boundary(self, view_number: int) -> None:
        """Wait until all members of that view are at the boundary.

        Raises:
            BrokenWorldException: the view has ended, or ends first.
            RendezvousError: the rendezvous server cannot be reached. If the view still works, this process stays a member.
            ElasticError: this process is no longer a member.
        """
        self.raise_if_ended()
        if self.state.phase != "ready" or self.state.view.number != view_number:
            raise self.view_ended(view_number)
        self._boundary = asyncio.get_running_loop().create_future()
        self.perform(self.state.enter_boundary(view_number))
        try:
            await self._boundary
        finally:
            self._boundary = None

    def raise_if_ended(self) -> None:
        """Raise a copy of `error` if this process is no longer a member."""
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def view_ended(self, view_number: int) -> BrokenWorldException:
        """Return the error of an operation whose view has ended."""
        return BrokenWorldException(self._name, Cause.ABORTED, -1, f"view {view_number} has ended")

    def leave(self, reason: EndReason, detail: str) -> None:
        """End the membership for a local reason; `raise_if_ended` raises from then on. Idempotent."""
        self.perform(self.state.leave(reason, detail))

    async def close(self) -> None:
        """Leave the world and free all resources. Idempotent."""
        self.leave("left", "this process left the world")
        if self._link is not None:
            await self._link.close(_FLUSH_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- actions of the member state -----------------------------------------------------------------------------------

    def perform(self, actions: Sequence[Action]) -> None:
        """Perform the actions of the member state, in order."""
        for action in actions:
            match action:
                case Send(message):
                    if self._link is not None:
                        self._link.send(message)
                case CloseView(view_number):
                    self._close_view(view_number)
                case FormView(view):
                    self._forming = self._spawn(self._form_world(view, self._forming))
                case ViewReady(view):
                    rank, size = view.rank_of(self.state.id), len(view.members)
                    logger.info("world=%s view=%d rank=%d of %d", self._name, view.number, rank, size)
                case EndBoundary(error):
                    self._end_boundary(None if error is None else RendezvousError(self._name, error))
                case EndMembership(reason, detail):
                    if reason != "left":
                        logger.warning("world=%s member=%s ended: %s", self._name, self.state.id, detail)
                    self.error = _ERRORS[reason](self._name, detail)
        self._changed.set()

    def _end_boundary(self, error: WorldError | None) -> None:
        if self._boundary is None or self._boundary.done():
            return
        if error is None:
            self._boundary.set_result(None)
        else:
            self._boundary.set_exception(error)

    def _close_view(self, view_number: int) -> None:
        self._end_boundary(self.view_ended(view_number))
        if self._forming is not None:
            self._forming.cancel()
        world = self._manager.worlds.get(self._name)
        if world is not None and world.generation == view_number:
            self._manager.remove_world(self._name)

    async def _form_world(self, view: View, previous: asyncio.Task[None] | None) -> None:
        """Form the world of `view` after the previous attempt has ended."""
        if previous is not None:
            await asyncio.gather(previous, return_exceptions=True)
        rank, size, first = view.rank_of(self.state.id), len(view.members), view.members[0]
        try:
            if size > 1:
                await self._manager.initialize_world(
                    self._name, rank, size, "multiworld", first.host, first.port, self._config.form_timeout_s,
                    generation=view.number, verify_collectives=False,
                )  # fmt: skip
        except (WorldError, OSError) as error:
            logger.info("world=%s view=%d did not form: %s", self._name, view.number, error)
            failure = error if isinstance(error, BrokenWorldException) else None
            self.perform(self.state.on_failed(view.number, suspect_of(self.state.id, view, failure)))
        else:
            self.perform(self.state.on_formed(view.number))

    async def _watch_world(self) -> None:
        """Report to the member state that the world of the current view broke."""
        async for event in self._manager.events():
            view = self.state.view
            if event.kind == "broken" and event.world_name == self._name and event.generation == view.number:
                world = self._manager.worlds.get(self._name)
                failure = world.failure if world is not None and world.generation == event.generation else None
                self.perform(self.state.on_failed(view.number, suspect_of(self.state.id, view, failure)))

    # -- the rendezvous server -----------------------------------------------------------------------------------------

    async def _receive_messages(self) -> None:
        """Receive messages from the rendezvous server. After a lost connection, reconnect for up to `view_change_timeout_s`."""
        while self.error is None:
            assert self._link is not None
            try:
                while True:
                    self.perform(self.state.on_message(await self._link.receive()))
            except (WorldError, MessageError) as error:
                reason = f"the connection to the rendezvous server is lost: {error}"
            if self.error is not None:
                return
            logger.info("world=%s member=%s: %s", self._name, self.state.id, reason)
            await self._link.close()
            try:
                self._link = await self._connect_with_retry(self._config.view_change_timeout_s)
            except EvictedError as error:
                self.perform(self.state.on_message(Evicted(error.message)))
            except (ElasticError, PermissionError) as error:
                self.perform(self.state.on_rendezvous_lost(f"{reason}; reconnecting failed: {error}"))
                return
            else:
                self.perform(self.state.on_reconnected())

    async def _connect_with_retry(self, timeout_s: float) -> RendezvousLink:
        """Connect to the rendezvous server and retry for `timeout_s`. Raises EvictedError, RendezvousError, PermissionError."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                return await self._connect()
            except (AskError, WorldError, ValueError) as error:
                if isinstance(error, ElasticError):
                    raise
                if asyncio.get_running_loop().time() > until_s:
                    detail = f"the rendezvous server could not be reached for {timeout_s:g} s: {error}"
                    raise RendezvousError(self._name, detail) from None
            await asyncio.sleep(_RETRY_PAUSE_S)

    async def _connect(self) -> RendezvousLink:
        """Make one attempt to connect.

        Raises:
            EvictedError, RendezvousError, PermissionError: the rendezvous server refuses this member.
            AskError, WorldError, ValueError: the attempt failed; another one may succeed.
        """
        config = self._config
        secret = config.secret.encode() if isinstance(config.secret, str) else config.secret
        request = {"elastic": self._name, "member": asdict(self._member), "resume": self.state.phase != "waiting"}
        data = await ask(config.addr, config.port, json.dumps(request), secret=secret, timeout_s=_CONNECT_TIMEOUT_S)
        match _parse_reply(data):
            case "evicted", reason:
                raise EvictedError(self._name, reason)
            case "refused", reason:
                raise RendezvousError(self._name, f"refused: {reason}")
            case "retry", reason:
                raise AskError(reason)
            case _, link_name:
                link = RendezvousLink(self._manager, link_name, 1)
        try:
            await link.open(config.addr, config.port, _CONNECT_TIMEOUT_S)
        except BaseException:
            await link.close()
            raise
        return link

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # An internal error must not leave a call waiting.
            logger.error("world=%s: internal error of the member agent", self._name, exc_info=error)
            self.leave("view_change", f"internal error: {error!r}")


def _parse_reply(data: bytes) -> tuple[str, str]:
    """Parse the reply of the rendezvous server: ("link", name), or ("retry" | "refused" | "evicted", reason). Raises ValueError."""
    try:
        [(kind, text)] = json.loads(data).items()
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"invalid reply of the rendezvous server: {data[:60]!r}") from error
    if kind not in ("link", "retry", "refused", "evicted") or not isinstance(text, str):
        raise ValueError(f"invalid reply of the rendezvous server: {data[:60]!r}")
    return kind, shown(text)


def suspect_of(member_id: str, view: View, failure: BrokenWorldException | None) -> str:
    """Return the id of the member that caused `failure`; "" if there is none, or if it is this member."""
    if failure is None or failure.cause not in _SUSPECT_CAUSES or not 0 <= failure.rank < len(view.members):
        return ""
    suspect = view.members[failure.rank].id
    return suspect if suspect != member_id else ""


def _local_host(addr: str, port: int) -> str:
    """Return the local address of the route to `addr`. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(addr, port, type=socket.SOCK_DGRAM)[0]
    with contextlib.closing(socket.socket(family, kind, protocol)) as sock:
        sock.connect(address)  # sends nothing
        return str(sock.getsockname()[0])
