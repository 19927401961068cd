"""Keeps one member's seat: does what its `Seat` decides, from the moment it joins until it leaves, whatever the application does meanwhile.

Everything here runs on the event loop on which the member joined; worlds are formed and heartbeats kept by the manager's own threads.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from multiworld.elastic import seat as moves
from multiworld.elastic.errors import DesyncError, ElasticError, EvictedError, ReformError, RendezvousError
from multiworld.elastic.link import Link
from multiworld.elastic.messages import Evicted, MessageError, Seating, View
from multiworld.elastic.seat import BoundaryFailed, BoundaryPassed, CloseEpoch, End, Fail, Form, Ready, Seat, Send
from multiworld.errors import AskError, BrokenWorldException, Cause, WorldError
from multiworld.question import ask
from multiworld.world_manager import WorldManager

logger = logging.getLogger(__name__)

_ASK_S = 5.0
"""How long one attempt to reach the rendezvous may take."""
_PAUSE_S = 0.2
_LAST_WORDS_S = 1.0
_TELLING = frozenset((Cause.EXIT, Cause.HANG, Cause.TRANSPORT))
"""Causes that say something about the member that they name."""
_ERRORS: dict[End, type[ElasticError]] = {
    "left": ElasticError,
    "evicted": EvictedError,
    "rendezvous": RendezvousError,
    "reform": ReformError,
    "desync": DesyncError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a member takes part.

    Attributes:
        addr, port: where the rendezvous listens.
        secret: what it must be shown.
        host: our own address as the other members reach it; "" is the one from which we reach the rendezvous.
        form_timeout_s: how long one attempt to form an epoch may take.
        reform_timeout_s: how long it may take until there is a next epoch, attempts that fail included; and how long the rendezvous is
            looked for when it is gone.
    """

    addr: str
    port: int
    secret: bytes | str = b""
    host: str = ""
    form_timeout_s: float = 10.0
    reform_timeout_s: float = 60.0


class Keeper:
    """
    Attributes:
        seat: what was decided so far.
        error: why we are no member any more; None while we are.
    """

    def __init__(self, manager: WorldManager, world_name: str, terms: Terms) -> None:
        self.seat = Seat(os.urandom(8).hex())
        self.error: ElasticError | None = None
        self._manager = manager
        self._name = world_name
        self._terms = terms
        self._self = Seating(self.seat.id, "", 0)
        self._link: Link | None = None
        self._changed = asyncio.Event()
        self._boundary: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._forming: asyncio.Task[None] | None = None

    # -- for the application -------------------------------------------------------------------------------------------------------

    async def join(self, timeout_s: float) -> None:
        """Come to the rendezvous, and wait until there is an epoch with us in it. Raises ElasticError, OSError."""
        terms = self._terms
        try:
            async with asyncio.timeout(timeout_s):
                host = terms.host or await asyncio.to_thread(_local_host, terms.addr, terms.port)
                self._self = Seating(self.seat.id, host, self._manager.listen(host))
                self._spawn(self._watch_epochs())
                self._link = await self._reach(timeout_s)
                self._spawn(self._follow())
                await self._until_later(0)
        except TimeoutError:
            detail = f"no epoch began with us within {timeout_s:g} s: too few members came, or those there did not come to a boundary"
            raise ReformError(self._name, detail) from None
        except PermissionError as error:
            raise RendezvousError(self._name, str(error)) from error
        self.raise_if_out()

    async def next_epoch(self, after: int) -> View:
        """The epoch that is ready, once it is a later one than `after`. Raises ElasticError when there will be none."""
        try:
            async with asyncio.timeout(self._terms.reform_timeout_s):
                await self._until_later(after)
        except TimeoutError:
            detail = f"no epoch after {after} within {self._terms.reform_timeout_s:g} s"
            self.perform(self.seat.give_up("reform", detail))
        self.raise_if_out()
        return self.seat.view

    async def _until_later(self, epoch: int) -> None:
        """Wait until a later epoch is ready, or there is none for us."""
        while self.error is None and not (self.seat.epoch > epoch and self.seat.is_in(self.seat.epoch)):
            self._changed.clear()
            await self._changed.wait()

    async def pass_boundary(self, timeout_s: float) -> None:
        """Let in whoever waits, with all others. Raises ElasticError."""
        self.raise_if_out()
        self._boundary = asyncio.get_running_loop().create_future()
        self.perform(self.seat.stand_at_boundary())
        try:
            async with asyncio.timeout(timeout_s):
                await self._boundary
        except TimeoutError:
            detail = f"not all members came to the boundary within {timeout_s:g} s"
            self.perform(self.seat.give_up("reform", detail))
            self.raise_if_out()
        finally:
            self._boundary = None

    def raise_if_out(self) -> None:
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    async def close(self) -> None:
        """Leave, and free everything. Idempotent."""
        self.perform(self.seat.give_up("left", "we left"))
        if self._link is not None:
            await self._link.close(_LAST_WORDS_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- what the seat decides -----------------------------------------------------------------------------------------------------

    def perform(self, actions: Sequence[moves.Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    if self._link is not None:
                        self._link.send(message)
                case CloseEpoch(epoch):
                    self._close_epoch(epoch)
                case Form(view):
                    self._forming = self._spawn(self._form(view, self._forming))
                case Ready(view):
                    logger.info(
                        "world=%s epoch=%d rank=%d of %d",
                        self._name,
                        view.epoch,
                        view.rank_of(self.seat.id),
                        len(view.members),
                    )
                case BoundaryPassed():
                    if self._boundary is not None and not self._boundary.done():
                        self._boundary.set_result(None)
                case BoundaryFailed(reason):
                    if self._boundary is not None and not self._boundary.done():
                        self._boundary.set_exception(RendezvousError(self._name, reason))
                case Fail(end, reason):
                    self._fail(end, reason)
        self._changed.set()

    def _fail(self, end: End, reason: str) -> None:
        if end != "left":
            logger.warning("world=%s member=%s is out: %s", self._name, self.seat.id, reason)
        self.error = _ERRORS[end](self._name, reason)
        if self._boundary is not None and not self._boundary.done():
            self._boundary.set_exception(_ERRORS[end](self._name, reason))

    def _close_epoch(self, epoch: int) -> None:
        if self._forming is not None:
            self._forming.cancel()
        known = self._manager.worlds.get(self._name)
        if known is not None and known.epoch == epoch:
            self._manager.remove_world(self._name)

    async def _form(self, view: View, former: asyncio.Task[None] | None) -> None:
        """Form the world of that epoch, once an older attempt has ended."""
        if former is not None:
            await asyncio.gather(former, return_exceptions=True)
        rank, size, first = view.rank_of(self.seat.id), len(view.members), view.members[0]
        try:
            if size > 1:
                await self._manager.initialize_world(
                    self._name, rank, size, "gloo", first.host, first.port, self._terms.form_timeout_s,
                    epoch=view.epoch, checked=False,
                )  # fmt: skip
        except (WorldError, OSError) as error:
            logger.info("world=%s epoch=%d did not form: %s", self._name, view.epoch, error)
            accused = self._accused(view, error) if isinstance(error, BrokenWorldException) else ""
            self.perform(self.seat.failed(view.epoch, accused))
        else:
            self.perform(self.seat.formed(view.epoch))

    async def _watch_epochs(self) -> None:
        """Tell the seat when the world of its epoch breaks."""
        async for event in self._manager.events():
            if event.kind == "broken" and event.world_name == self._name and event.epoch == self.seat.epoch:
                world = self._manager.worlds.get(self._name)
                failure = world.failure if world is not None and world.epoch == event.epoch else None
                self.perform(self.seat.failed(event.epoch, self._accused(self.seat.view, failure)))

    def _accused(self, view: View, failure: BrokenWorldException | None) -> str:
        """The id of the member that was lost, where that can be told."""
        if failure is None or failure.cause not in _TELLING or not 0 <= failure.rank < len(view.members):
            return ""
        return view.members[failure.rank].id

    # -- the rendezvous ------------------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Hear the rendezvous. When it is lost, look for it until it is back, or too long."""
        while self.error is None:
            assert self._link is not None
            try:
                while True:
                    self.perform(self.seat.heard(await self._link.receive()))
            except (WorldError, MessageError) as error:
                reason = f"the rendezvous is gone: {error}"
            if self.error is not None:
                return
            logger.info("world=%s member=%s: %s", self._name, self.seat.id, reason)
            await self._link.close()
            try:
                self._link = await self._reach(self._terms.reform_timeout_s)
            except EvictedError as error:
                self.perform(self.seat.heard(Evicted(error.message)))
            except (ElasticError, PermissionError) as error:
                self.perform(self.seat.severed(f"{reason}; then {error}"))
                return
            else:
                self.perform(self.seat.reconnected())

    async def _reach(self, timeout_s: float) -> Link:
        """Connect with the rendezvous, which may be starting. Raises EvictedError, RendezvousError, PermissionError."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                return await self._connect()
            except (AskError, WorldError, ValueError) as error:
                if isinstance(error, ElasticError):
                    raise
                if asyncio.get_running_loop().time() > until_s:
                    detail = f"the rendezvous cannot be reached for {timeout_s:g} s: {error}"
                    raise RendezvousError(self._name, detail) from None
            await asyncio.sleep(_PAUSE_S)

    async def _connect(self) -> Link:
        terms, member = self._terms, self._self
        secret = terms.secret.encode() if isinstance(terms.secret, str) else terms.secret
        who = {"id": member.id, "host": member.host, "port": member.port}
        question = {"elastic": self._name, "member": who, "resume": self.seat.state != "waiting"}
        answer = json.loads(await ask(terms.addr, terms.port, json.dumps(question), secret=secret, timeout_s=_ASK_S))
        if "evicted" in answer:
            raise EvictedError(self._name, answer["evicted"])
        if "refused" in answer:
            raise RendezvousError(self._name, f"refused: {answer['refused']}")
        if "later" in answer:
            raise AskError(answer["later"])
        link = Link(self._manager, answer["link"], 1)
        try:
            await link.open(terms.addr, terms.port, _ASK_S)
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
        if (
            not task.cancelled() and (error := task.exception()) is not None
        ):  # a defect of ours must not leave anybody waiting
            logger.error("world=%s: keeping the seat failed", self._name, exc_info=error)
            self.perform(self.seat.give_up("reform", f"an internal error: {error!r}"))


def _local_host(addr: str, port: int) -> str:
    """Our address on the way to there. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(addr, port, type=socket.SOCK_DGRAM)[0]
    with contextlib.closing(socket.socket(family, kind, protocol)) as sock:
        sock.connect(address)  # sends nothing
        return str(sock.getsockname()[0])
