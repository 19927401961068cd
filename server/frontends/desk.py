"""Where frontends come to: the leader's end of the connections to them, and the processes themselves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fastapi import FastAPI
from pydantic import SecretStr

from config import UserError
from server.accounts import LocalAccounts, RequestOutcome
from server.errors import RequestRefused
from server.frontends.credential_files import read_files
from server.frontends.forwarding import Forwarded
from server.frontends.frames import Frame, FrameLink, Kind
from server.frontends.messages import (
    answer_facts,
    answer_payload,
    image_of,
    outcome_of,
    refusal_facts,
    state_facts,
)
from server.leader import Leader
from server.metrics import Metrics
from server.metrics import Protocol as InferenceProtocol
from server.predictor import ServedModel
from server.processes import FrontendProcesses
from server.request_traces import current_span, remote_span
from server.settings import ServeSettings

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_FROZEN_S = 5.0
"""A frontend that has said nothing for so long is killed; with long heartbeats, for as many of those."""
_FROZEN_HEARTBEATS = 3
_RECENT_S = 1.0
"""So long a frontend's word holds of how many requests it prepares."""
_RETRY_S = 1.0
_PRIVATE = frozenset({"token", "token_file"})
"""What a frontend has no business to know."""


class FrontDesk:
    """Starts the frontends, listens for them, and does what they ask, within its `async with`.

    Args:
        app: answers what is no inference. Its lifespan is ours.
        accounts: of all requests, wherever they come in.
        http: the listening socket that all frontends serve; closed when they end.
        start: gives the processes of the frontends, which are to find us at that path.

    Attributes:
        ended: set when it can be of no more use, which is a defect of ours.
    """

    def __init__(
        self,
        settings: ServeSettings,
        model: ServedModel,
        leader: Leader,
        app: FastAPI,
        accounts: LocalAccounts,
        metrics: Metrics,
        http: socket.socket,
        start: Callable[[str], AbstractAsyncContextManager[FrontendProcesses]],
    ) -> None:
        self.model = model
        self.leader = leader
        self.app = app
        self.accounts = accounts
        self.ended = asyncio.Event()
        self._settings = settings
        self._files = read_files(settings)
        self._metrics = metrics
        self._http = http
        self._start = start
        self._processes: FrontendProcesses | None = None
        self._guests: set[_Guest] = set()
        self._frozen_s = max(_FROZEN_S, _FROZEN_HEARTBEATS * settings.heartbeat_timeout_s)
        self._exits = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.app.router.lifespan_context(self.app))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="multiworld-"))  # this user's alone
            path = str(Path(folder) / "leader")
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                listener.bind(path)
            except OSError as error:
                raise UserError(
                    f"cannot listen at {path}: {error}; set TMPDIR to another, or shorter, folder"
                ) from error
            listener.listen()
            listener.setblocking(False)
            stack.callback(self._dismiss)
            for work in (self._receive(listener), self._watch()):
                task = asyncio.create_task(work)
                task.add_done_callback(lambda _: self.ended.set())
                stack.push_async_callback(_cancelled, task)
            self._processes = await stack.enter_async_context(self._start(path))
            self.leader.under_way.elsewhere = self
            # Frontends have theirs: with this one, clients would still be let in when the last of them has ended.
            stack.callback(self._http.close)
            self._exits = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._exits.aclose()

    def state_changed(self) -> None:
        """Another version serves, or requests are refused from now on, or not any more."""
        for guest in self._guests:
            guest.tell_state()

    async def renew(self) -> None:
        """Read keys and certificates anew, and have them used. Raises UserError when they cannot be: nothing has changed then."""
        self._files = read_files(self._settings)
        await self._all(Kind.RENEW, self._files)

    # -- for `UnderWay` --------------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Requests that have begun at the frontends."""
        return sum(len(guest.requests) for guest in self._guests)

    async def none(self) -> None:
        """Wait until every frontend has said that nothing is under way: it knows of requests of which we have not heard yet."""
        self.state_changed()
        await self._all(Kind.SETTLE)

    async def informed(self) -> None:
        """Wait until every frontend knows how the leader stands."""
        await self._all(Kind.STATE, self.state())

    # -- for guests ------------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """See `Kind.STATE`."""
        return state_facts(self.leader.version, self.leader.closed())

    def welcome(self) -> dict[str, Any]:
        """What a frontend must know."""
        settings = {name: value for name, value in self._settings if name not in _PRIVATE}
        plain = {name: v.get_secret_value() if isinstance(v, SecretStr) else v for name, v in settings.items()}
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in plain.items()}
        return {"settings": plain, "files": self._files, "model": vars(self.model)}

    def came(self, guest: _Guest) -> None:
        """A frontend has said its name."""
        self._guests.add(guest)

    def serves(self, guest: _Guest) -> None:
        """A frontend answers clients."""
        logger.info("frontend %s serves", guest.name)
        if self._processes is not None:
            self._processes.proven(guest.name)
        self._tell()

    def went(self, guest: _Guest) -> None:
        """A frontend's connection has ended."""
        self._guests.discard(guest)
        logger.info("frontend %s has gone requests=%d", guest.name or "without a name", len(guest.requests))
        for number, (protocol, began_s) in guest.requests.items():  # their clients' connections broke
            lost_s = time.monotonic() - began_s
            version = self.leader.version.name
            self.accounts.request_ended(number, RequestOutcome(version, protocol, 500, "internal", lost_s, None))
        guest.requests.clear()
        self._tell()

    def ahead(self, guest: _Guest) -> int:
        """How many requests all frontends prepare, as that one has just said and the others lately."""
        recent_s = guest.heard_s - _RECENT_S
        return sum(each.ahead for each in self._guests if each is guest or each.ahead_s > recent_s)

    def connections_changed(self) -> None:
        """A frontend has said how many it has."""
        self._metrics.connections(sum(guest.connections for guest in self._guests))

    def connection_closed(self, reason: str) -> None:
        """A frontend has closed one."""
        self._metrics.connection_closed(reason)

    # -- inside ----------------------------------------------------------------------------------------------------------------

    def _dismiss(self) -> None:
        for guest in tuple(self._guests):
            guest.link.close()

    async def _receive(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection = None
            try:
                connection, _ = await loop.sock_accept(listener)
                # New, and so with room for one byte: this does not block.
                socket.send_fds(connection, [b"\0"], [self._http.fileno()])
                guest = _Guest(self)
                await loop.connect_accepted_socket(lambda guest=guest: guest.link, connection)  # type: ignore[misc]
            except OSError as error:
                logger.warning("a frontend cannot be let in: %s", error)
                if connection is not None:
                    connection.close()
                await asyncio.sleep(_RETRY_S)

    async def _watch(self) -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(_LOOK_S)
            late_s = time.monotonic() - began_s - _LOOK_S
            for guest in tuple(self._guests):
                if late_s > _LOOK_S:  # we ourselves stood still, and could hear nobody
                    guest.heard_s += late_s
                if guest.serving and guest.silent_s > self._frozen_s:
                    logger.error("frontend %s has said nothing for %.1f s: killing it", guest.name, guest.silent_s)
                    guest.link.close()
                    if self._processes is not None:
                        self._processes.end(guest.name)
                else:
                    guest.link.send(Kind.PING)

    async def _all(self, kind: Kind, facts: Mapping[str, Any] | None = None) -> None:
        """Have every frontend that there is do something, and wait until they have."""
        await asyncio.gather(*(guest.ask(kind, facts) for guest in tuple(self._guests)))

    def _tell(self) -> None:
        names = {guest.name for guest in self._guests if guest.serving}
        self._metrics.frontends(len(names))
        self.connections_changed()
        if self._processes is not None:
            self._processes.present(names)


class _Guest:
    """One frontend, from its coming to its end.

    Attributes:
        serving: whether it answers clients.
        heard_s: when it has last said anything.
        ahead: how many requests it prepared when it said so last, which was at `ahead_s`.
        requests: that have begun there and not ended: how they came in, and when.
        connections: how many it has.
    """

    def __init__(self, desk: FrontDesk) -> None:
        self.name = ""
        self.serving = False
        self.link = FrameLink(self._on_frame, self._on_lost)
        self.heard_s = time.monotonic()
        self.ahead, self.ahead_s = 0, 0.0
        self.requests: dict[int, tuple[InferenceProtocol, float]] = {}
        self.connections = 0
        self._desk = desk
        self._forwarded = Forwarded(desk.app, self.link)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)
        self._lost = False

    @property
    def silent_s(self) -> float:
        """How long it has said nothing. Its event loop answers each question of the desk."""
        return time.monotonic() - self.heard_s

    def tell_state(self) -> None:
        """See `Kind.STATE`."""
        self.link.send(Kind.STATE, facts=self._desk.state())

    async def ask(self, kind: Kind, facts: Mapping[str, Any] | None) -> None:
        """Have it do something, and wait until it has, or is gone: it is killed when it is frozen."""
        if self._lost:
            return
        number = next(self._numbers)
        done = self._asked[number] = asyncio.get_running_loop().create_future()
        self.link.send(kind, number, facts)
        await done

    def _on_frame(self, frame: Frame) -> None:
        self.heard_s = time.monotonic()
        match frame.kind:
            case Kind.CHECK:
                self._check(frame)
            case Kind.PREDICT:
                task = self._tasks[frame.number] = asyncio.create_task(self._predict(frame))
                task.add_done_callback(lambda _: self._tasks.pop(frame.number, None))
            case Kind.CANCEL:
                if (known := self._tasks.get(frame.number)) is not None:
                    known.cancel()
            case Kind.BEGAN | Kind.ENDED | Kind.CONNECTIONS | Kind.CLOSED:
                self._account(frame)
            case Kind.REQUEST | Kind.TAKEN | Kind.GONE:
                self._forwarded.on_frame(frame)
            case Kind.DONE:
                _settle(self._asked.pop(frame.number))
            case Kind.HERE:
                self.name = str(frame.facts["name"])
                self._desk.came(self)
                self.tell_state()
                self.link.send(Kind.WELCOME, facts=self._desk.welcome())
            case Kind.SERVES:
                self.serving = True
                self._desk.serves(self)
            case Kind.PONG:
                pass
            case _:
                raise ValueError(f"{frame.kind.name} was not to be expected here")

    def _account(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.BEGAN:
                self._desk.accounts.request_began(frame.facts["protocol"])
                self.requests[frame.number] = (frame.facts["protocol"], self.heard_s)
            case Kind.ENDED:
                del self.requests[frame.number]
                self._desk.accounts.request_ended(frame.number, outcome_of(frame.facts))
            case Kind.CONNECTIONS:
                self.connections = int(frame.facts["count"])
                self._desk.connections_changed()
            case Kind.CLOSED:
                self._desk.connection_closed(frame.facts["reason"])

    def _check(self, frame: Frame) -> None:
        self.ahead, self.ahead_s = int(frame.facts["ahead"]), self.heard_s
        refusal = self._desk.leader.refusal(frame.facts["deadline_s"], self._desk.ahead(self))
        if refusal is None:
            self.link.send(Kind.FINE, frame.number)
        else:
            self.link.send(Kind.REFUSED, frame.number, refusal_facts(refusal))

    async def _predict(self, frame: Frame) -> None:
        facts = frame.facts
        if facts["span"] is not None:
            current_span.set(remote_span(*facts["span"]))
        try:
            image = image_of(frame.payload, self._desk.model.crop_size)
            answer = await self._desk.leader.predict(
                image, deadline_s=facts["deadline_s"], request_id=facts["request_id"]
            )
            self.link.send(Kind.ANSWER, frame.number, answer_facts(answer), answer_payload(answer))
        except RequestRefused as refusal:
            self.link.send(Kind.REFUSED, frame.number, refusal_facts(refusal))
        except Exception:
            logger.exception("request failed request_id=%s", facts["request_id"])
            self.link.send(Kind.REFUSED, frame.number, refusal_facts(None))

    def _on_lost(self) -> None:
        self._lost = True
        for task in self._tasks.values():
            task.cancel()
        for done in self._asked.values():
            _settle(done)
        self._forwarded.on_lost()
        self._desk.went(self)


def _settle(done: asyncio.Future[None]) -> None:
    if not done.done():  # who asked may have been cancelled
        done.set_result(None)


async def _cancelled(task: asyncio.Task[None]) -> None:
    if task.done() and not task.cancelled() and task.exception() is not None:
        logger.error("the frontends' desk failed", exc_info=task.exception())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
