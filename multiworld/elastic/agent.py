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
from dataclasses import dataclass

from multiworld.control.query import ask
from multiworld.elastic.errors import DesyncError, ElasticError, EvictedError, ReformError, RendezvousError
from multiworld.elastic.protocol import member_state as moves
from multiworld.elastic.protocol.member_state import (
    BoundaryFailed,
    BoundaryPassed,
    CloseEpoch,
    End,
    Fail,
    Form,
    MemberState,
    Ready,
    Send,
)
from multiworld.elastic.protocol.messages import Evicted, MemberInfo, MessageError, View
from multiworld.elastic.rendezvous_link import Link
from multiworld.errors import AskError, BrokenWorldException, Cause, WorldError
from multiworld.manager import WorldManager
from multiworld.texts import shown

logger = logging.getLogger(__name__)

_ASK_S = 5.0
"""Seconds that one attempt to reach the rendezvous may take."""
_PAUSE_S = 0.2
"""Seconds between two attempts to reach the rendezvous."""
_LAST_WORDS_S = 1.0
"""Seconds that `close` waits until the queued messages are sent."""
_ACCUSING = frozenset((Cause.EXIT, Cause.HANG, Cause.STALLED, Cause.TRANSPORT, Cause.LOCAL))
"""Causes that make the failed rank a suspect. LOCAL counts because a member that fails locally reports it to the others."""
_ERRORS: dict[End, type[ElasticError]] = {
    "left": ElasticError,
    "evicted": EvictedError,
    "rendezvous": RendezvousError,
    "reform": ReformError,
    "desync": DesyncError,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConfig:
    """Settings of one member.

    Attributes:
        addr, port: address of the rendezvous.
        secret: the secret of the rendezvous.
        host: address at which the other members reach this process; "" uses the local address of the route to the rendezvous.
        form_timeout_s: seconds that one attempt to form an epoch may take.
        reform_timeout_s: seconds to wait for the next epoch, failed attempts included; also seconds to try to reach the
            rendezvous after the connection to it is lost.
    """

    addr: str
    port: int
    secret: bytes | str = b""
    host: str = ""
    form_timeout_s: float = 10.0
    reform_timeout_s: float = 60.0


class MemberAgent:
    """Runs one membership: the connection to the rendezvous and the formation of each epoch's world.

    Attributes:
        seat: the state of this member.
        error: why this process is no longer a member; None while it is one.
    """

    def __init__(self, manager: WorldManager, world_name: str, terms: MemberConfig) -> None:
        self.seat = MemberState(os.urandom(8).hex())
        self.error: ElasticError | None = None
        self._manager = manager
        self._name = world_name
        self._terms = terms
        self._self = MemberInfo(self.seat.id, "", 0)
        self._link: Link | None = None
        self._changed = asyncio.Event()
        self._boundary: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._forming: asyncio.Task[None] | None = None

    # -- for the application -------------------------------------------------------------------------------------------------------

    async def join(self, timeout_s: float) -> None:
        """Register at the rendezvous and wait for the first epoch that includes this member. Raises ElasticError, OSError."""
        terms = self._terms
        try:
            async with asyncio.timeout(timeout_s):
                host = terms.host or await asyncio.to_thread(_local_host, terms.addr, terms.port)
                # In a thread, because `host` may be a name to resolve.
                port = await asyncio.to_thread(self._manager.listen, host)
                self._self = MemberInfo(self.seat.id, host, port)
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
        """Wait until an epoch later than `after` is ready and return its view.

        Raises ElasticError when this process is no longer a member. After `reform_timeout_s` the member gives up with ReformError.
        """
        try:
            async with asyncio.timeout(self._terms.reform_timeout_s):
                await self._until_later(after)
        except TimeoutError:
            detail = f"no epoch after {after} within {self._terms.reform_timeout_s:g} s"
            self.perform(self.seat.give_up("reform", detail))
        self.raise_if_out()
        return self.seat.view

    async def _until_later(self, epoch: int) -> None:
        """Wait until an epoch later than `epoch` is ready, or this process is no longer a member."""
        while self.error is None and not (self.seat.epoch > epoch and self.seat.is_in(self.seat.epoch)):
            self._changed.clear()
            await self._changed.wait()

    async def stand_at_boundary(self, epoch: int) -> None:
        """Wait until all members of `epoch` are at the boundary.

        Raises:
            BrokenWorldException: the epoch is over, or ends first.
            RendezvousError: the rendezvous cannot be reached. If the epoch still works, this process stays a member.
            ElasticError: this process is no longer a member.
        """
        self.raise_if_out()
        if self.seat.state != "ready" or self.seat.epoch != epoch:
            raise self._over(epoch)
        self._boundary = asyncio.get_running_loop().create_future()
        self.perform(self.seat.stand_at_boundary(epoch))
        try:
            await self._boundary
        finally:
            self._boundary = None

    def raise_if_out(self) -> None:
        """Raise a copy of `error` if this process is no longer a member."""
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    async def close(self) -> None:
        """Leave the world and free all resources. Idempotent."""
        self.perform(self.seat.give_up("left", "we left"))
        if self._link is not None:
            await self._link.close(_LAST_WORDS_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- actions of the member state -----------------------------------------------------------------------------------------------

    def perform(self, actions: Sequence[moves.Action]) -> None:
        """Perform the actions of the member state, in order."""
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
                    self._end_boundary(RendezvousError(self._name, reason))
                case Fail(end, reason):
                    self._fail(end, reason)
        self._changed.set()

    def _fail(self, end: End, reason: str) -> None:
        if end != "left":
            logger.warning("world=%s member=%s is out: %s", self._name, self.seat.id, reason)
        self.error = _ERRORS[end](self._name, reason)

    def _end_boundary(self, error: WorldError) -> None:
        if self._boundary is not None and not self._boundary.done():
            self._boundary.set_exception(error)

    def _over(self, epoch: int) -> BrokenWorldException:
        return BrokenWorldException(self._name, Cause.ABORTED, -1, f"epoch {epoch} is over")

    def _close_epoch(self, epoch: int) -> None:
        self._end_boundary(self._over(epoch))
        if self._forming is not None:
            self._forming.cancel()
        known = self._manager.worlds.get(self._name)
        if known is not None and known.epoch == epoch:
            self._manager.remove_world(self._name)

    async def _form(self, view: View, former: asyncio.Task[None] | None) -> None:
        """Form the world of `view` after the previous attempt has ended."""
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
            failure = error if isinstance(error, BrokenWorldException) else None
            self.perform(self.seat.failed(view.epoch, accused_by(self.seat.id, view, failure)))
        else:
            self.perform(self.seat.formed(view.epoch))

    async def _watch_epochs(self) -> None:
        """Report to the member state that the world of the current epoch broke."""
        async for event in self._manager.events():
            if event.kind == "broken" and event.world_name == self._name and event.epoch == self.seat.epoch:
                world = self._manager.worlds.get(self._name)
                failure = world.failure if world is not None and world.epoch == event.epoch else None
                self.perform(self.seat.failed(event.epoch, accused_by(self.seat.id, self.seat.view, failure)))

    # -- the rendezvous ------------------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Receive messages from the rendezvous. After a lost connection, reconnect for up to `reform_timeout_s`."""
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
        """Connect to the rendezvous and retry for `timeout_s`. Raises EvictedError, RendezvousError, PermissionError."""
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
        """Make one attempt to connect.

        Raises:
            EvictedError, RendezvousError, PermissionError: the rendezvous refuses this member.
            AskError, WorldError, ValueError: the attempt failed; another one may succeed.
        """
        terms, member = self._terms, self._self
        secret = terms.secret.encode() if isinstance(terms.secret, str) else terms.secret
        who = {"id": member.id, "host": member.host, "port": member.port}
        question = {"elastic": self._name, "member": who, "resume": self.seat.state != "waiting"}
        answer = _answer(await ask(terms.addr, terms.port, json.dumps(question), secret=secret, timeout_s=_ASK_S))
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
        if not task.cancelled() and (error := task.exception()) is not None:
            # An internal error must not leave a call waiting.
            logger.error("world=%s: keeping the seat failed", self._name, exc_info=error)
            self.perform(self.seat.give_up("reform", f"an internal error: {error!r}"))


def _answer(data: bytes) -> dict[str, str]:
    """Parse the answer of the rendezvous: one of `link`, `later`, `refused`, `evicted`. Raises ValueError for anything else."""
    try:
        match json.loads(data):
            case (
                {"link": str(text)} | {"later": str(text)} | {"refused": str(text)} | {"evicted": str(text)} as answer
            ) if len(answer) == 1:
                return {kind: shown(text) for kind in answer}
    except RecursionError as error:
        raise ValueError(f"the rendezvous answers something else: {error}") from error
    raise ValueError(f"the rendezvous answers something else: {data[:60]!r}")


def accused_by(member_id: str, view: View, failure: BrokenWorldException | None) -> str:
    """Return the id of the member that caused `failure`; "" if there is none, or if it is this member."""
    if failure is None or failure.cause not in _ACCUSING or not 0 <= failure.rank < len(view.members):
        return ""
    accused = view.members[failure.rank].id
    return accused if accused != member_id else ""


def _local_host(addr: str, port: int) -> str:
    """Return the local address of the route to `addr`. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(addr, port, type=socket.SOCK_DGRAM)[0]
    with contextlib.closing(socket.socket(family, kind, protocol)) as sock:
        sock.connect(address)  # sends nothing
        return str(sock.getsockname()[0])
