"""Performs the actions of a member's `MemberState` from join to leave, independently of the application's calls.

All code here runs on the event loop on which the member joined. The threads of the `WorldManager` form worlds and send heartbeats.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from multiworld.collectives.movement import all_gather_into_tensor
from multiworld.control.dial import ask, local_host
from multiworld.elastic.protocol import messages
from multiworld.elastic.protocol.member_state import Action, CloseView, EndMembership, FormView, MemberState, Send
from multiworld.elastic.rendezvous_link import RendezvousLink
from multiworld.errors import (
    AskError,
    BrokenWorldException,
    Cause,
    ElasticError,
    EvictedError,
    RendezvousError,
    ViewChangeError,
    WorldClosedError,
    WorldError,
)
from multiworld.events import WorldEvent
from multiworld.manager import WorldManager
from multiworld.ops.buffers import byte_view
from multiworld.texts import one_line
from multiworld.world import World

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
"""Seconds that one attempt to connect to the rendezvous server may take."""
_RETRY_PAUSE_S = 0.2
"""Seconds between two attempts to connect to the rendezvous server."""
_SUSPECT_CAUSES = frozenset((Cause.EXIT, Cause.HANG, Cause.STALLED, Cause.TRANSPORT, Cause.LOCAL))
"""Causes that make the failed rank a suspect. LOCAL counts because a member that fails locally reports it to the others."""


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
    secret: bytes
    host: str
    form_timeout_s: float
    view_change_timeout_s: float


class MemberAgent:
    """Runs one membership: the connection to the rendezvous server and the formation of each view's world.

    Attributes:
        state: the state of this member.
        error: why this process is no longer a member; None while it is one.

    Args:
        manager: owns the worlds of the views and the link. `close` closes it.
    """

    def __init__(self, manager: WorldManager, world_name: str, config: MemberConfig) -> None:
        self.state = MemberState(os.urandom(8).hex())
        self.error: ElasticError | None = None
        self._manager = manager
        self._name = world_name
        self._config = config
        self._member = messages.MemberInfo(self.state.id, "", 0)
        self._link: RendezvousLink | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._forming: asyncio.Task[None] | None = None
        self._world: World | None = None  # of the last view that formed; None in a view of one member

    # -- for the application -------------------------------------------------------------------------------------------

    async def join(self, timeout_s: float) -> None:
        """Register at the rendezvous server and wait for the first view that includes this member. Raises ElasticError, OSError."""
        config = self._config
        try:
            async with asyncio.timeout(timeout_s):
                # In threads, because names may have to be resolved.
                host = config.host or await asyncio.to_thread(local_host, config.addr, config.port)
                port = await asyncio.to_thread(self._manager.listen, host)
                self._member = messages.MemberInfo(self.state.id, host, port)
                self._spawn(self._watch_world())
                self._link = await self._connect(timeout_s)
                self._spawn(self._receive_messages())
                await self._wait_for_view(0)
        except TimeoutError:
            detail = f"no view included this member within {timeout_s:g} s: too few members joined, or the others were not at a boundary"
            raise ViewChangeError(self._name, detail) from None
        except PermissionError as error:
            raise RendezvousError(self._name, str(error)) from error
        self.raise_if_ended()

    async def next_view(self, after: int) -> int:
        """Wait until a view later than `after` is ready and return its number.

        Raises ElasticError when this process is no longer a member. After `view_change_timeout_s` the member leaves with ViewChangeError.
        """
        try:
            async with asyncio.timeout(self._config.view_change_timeout_s):
                await self._wait_for_view(after)
        except TimeoutError:
            detail = f"no view after {after} formed within {self._config.view_change_timeout_s:g} s"
            self.leave(ViewChangeError, detail)
        self.raise_if_ended()
        return self.state.view.number

    async def all_gather(self, view_number: int, data: bytes) -> list[bytes]:
        """All-gather `data`, of the same length on all members; return the data of every member, ordered by rank.

        Raises BrokenWorldException when the view has ended, ElasticError when this process is no longer a member.
        """
        with self.world_of(view_number) as world:
            if world is None or not data:
                return [data] * len(self.state.view.members)
            own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            gathered = torch.empty(world.size * len(data), dtype=torch.uint8)
            await world.start(all_gather_into_tensor(world.facts, gathered, own)).finish()
        return [bytes(byte_view(part)) for part in torch.split(gathered, len(data))]

    @contextlib.contextmanager
    def world_of(self, view_number: int) -> Iterator[World | None]:
        """Return the world of this view, None in a view of one member, for operations in the context.

        It is the world itself, not its name, because the world of the next view has the same name: an operation that starts after the end
        of its view fails. Raises BrokenWorldException when the view has ended, ElasticError when this process is not a member.
        """
        self.raise_if_ended()
        if not self.state.is_in(view_number):
            raise self.view_ended(view_number)
        try:
            yield self._world
        except WorldClosedError:
            self.raise_if_ended()
            raise self.view_ended(view_number) from None

    def raise_if_ended(self) -> None:
        """Raise a copy of `error` if this process is no longer a member."""
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def view_ended(self, view_number: int) -> BrokenWorldException:
        """Return the error of an operation whose view has ended."""
        return BrokenWorldException(self._name, Cause.ABORTED, -1, f"view {view_number} has ended")

    def leave(self, error: type[ElasticError], detail: str) -> None:
        """End the membership for a local reason; `raise_if_ended` raises from then on. Idempotent."""
        self.perform(self.state.leave(error, detail))

    async def close(self) -> None:
        """Leave the world and free all resources. Idempotent."""
        self.leave(ElasticError, "this process left the world")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._manager.aclose()

    async def _wait_for_view(self, after: int) -> None:
        """Wait until a view later than `after` is ready, or this process is no longer a member."""
        state = self.state
        while self.error is None and not (state.view.number > after and state.is_in(state.view.number)):
            self._changed.clear()
            await self._changed.wait()

    # -- actions of the member state -----------------------------------------------------------------------------------

    def perform(self, actions: Sequence[Action]) -> None:
        """Perform the actions of the member state, in order."""
        for action in actions:
            match action:
                case Send(message):
                    if self._link is not None:
                        self._link.send(message)
                case CloseView():
                    self._close_view()
                case FormView(view):
                    self._forming = self._spawn(self._form_world(view, self._forming))
                case EndMembership(error, detail):
                    if error is not ElasticError:
                        logger.warning("world=%s member=%s ended: %s", self._name, self.state.id, detail)
                    self.error = error(self._name, detail)
                    if self._link is not None:
                        self._link.close()
        self._changed.set()

    def _close_view(self) -> None:
        if self._forming is not None:
            self._forming.cancel()
        if self._world is not None:
            self._world.close()
            self._world = None

    async def _form_world(self, view: messages.View, previous: asyncio.Task[None] | None) -> None:
        """Form the world of `view` after the previous attempt has ended."""
        if previous is not None:
            await asyncio.gather(previous, return_exceptions=True)
        rank, size, first = view.rank_of(self.state.id), len(view.members), view.members[0]
        try:
            if size > 1:
                self._world = await self._manager.initialize_world(
                    self._name, rank, size, "multiworld", first.host, first.port, self._config.form_timeout_s,
                    generation=view.number,
                )  # fmt: skip
        except (WorldError, OSError) as error:
            logger.info("world=%s view=%d did not form: %s", self._name, view.number, error)
            self.perform(self.state.on_failed(view.number, suspect_of(self.state.id, view, error)))
        else:
            logger.info("world=%s view=%d rank=%d of %d", self._name, view.number, rank, size)
            self.state.on_formed(view.number)
            self._changed.set()

    async def _watch_world(self) -> None:
        """Report to the member state that the world of the current view broke."""
        async for event in self._manager.events():
            view = self.state.view
            if event.kind == "broken" and event.world_name == self._name and event.generation == view.number:
                self.perform(self.state.on_failed(view.number, suspect_of(self.state.id, view, event)))

    # -- the rendezvous server -----------------------------------------------------------------------------------------

    async def _receive_messages(self) -> None:
        """Receive messages from the rendezvous server. After a lost connection, reconnect for up to `view_change_timeout_s`."""
        assert self._link is not None
        while self.error is None:
            try:
                while True:
                    self.perform(self.state.on_message(await self._link.receive()))
            except (WorldError, messages.MessageError) as error:
                reason = f"the connection to the rendezvous server is lost: {error}"
            if self.error is not None:
                return
            logger.info("world=%s member=%s: %s", self._name, self.state.id, reason)
            self._link.close()
            try:
                self._link = await self._connect(self._config.view_change_timeout_s)
            except EvictedError as error:
                self.perform(self.state.on_message(messages.Evicted(error.message)))
            except (ElasticError, PermissionError) as error:
                self.perform(self.state.on_rendezvous_lost(f"{reason}; reconnecting failed: {error}"))
                return
            else:
                self.perform(self.state.on_reconnected())
        self._link.close()  # the membership may have ended while the link was opened

    async def _connect(self, timeout_s: float) -> RendezvousLink:
        """Connect to the rendezvous server and retry for `timeout_s`. Raises EvictedError, RendezvousError, PermissionError."""
        config, until_s = self._config, asyncio.get_running_loop().time() + timeout_s
        join = messages.encode(messages.Join(self._name, self._member, resume=self.state.phase != "waiting")).decode()
        while True:
            try:
                reply = await ask(config.addr, config.port, join, secret=config.secret, timeout_s=_CONNECT_TIMEOUT_S)
                match messages.decode(reply):
                    case messages.Evicted(reason):
                        raise EvictedError(self._name, one_line(reason))
                    case messages.Refused(reason):
                        raise RendezvousError(self._name, f"refused: {one_line(reason)}")
                return await RendezvousLink.open(
                    self._manager, self._name, self.state.id, 1, config.addr, config.port, _CONNECT_TIMEOUT_S
                )
            except ElasticError:
                raise
            except (AskError, WorldError, messages.MessageError) as error:
                if asyncio.get_running_loop().time() > until_s:
                    detail = f"the rendezvous server could not be reached for {timeout_s:g} s: {error}"
                    raise RendezvousError(self._name, detail) from None
            await asyncio.sleep(_RETRY_PAUSE_S)

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
            self.leave(ViewChangeError, f"internal error: {error!r}")


def suspect_of(member_id: str, view: messages.View, failure: Exception | WorldEvent) -> str:
    """Return the id of the member that caused `failure`; "" if there is none, or if it is this member."""
    match failure:
        case BrokenWorldException(cause=cause, rank=int(rank)) | WorldEvent(cause=cause, rank=int(rank)):
            if cause in _SUSPECT_CAUSES and 0 <= rank < len(view.members) and view.members[rank].id != member_id:
                return view.members[rank].id
    return ""
