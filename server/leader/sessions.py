"""The leader's side of the frontends: admits them, and replies to the messages of each in a session."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import time
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import msgspec

from multiworld import AskError, JoinError, World, WorldError, WorldManager
from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.service.errors import StageError
from multiworld_serving.common.service.messages import (
    FRONTEND_PROTOCOL,
    MAX_BYTES,
    AdminOperation,
    Done,
    Follow,
    LeaderState,
    Metrics,
    Predict,
    Scrape,
    Step,
    parse_rows,
)
from multiworld_serving.common.service.predictor import Prediction, ServedModel, Trace
from multiworld_serving.common.service.snapshots import FrontendSnapshot, PipelineSnapshot
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.wire.inputs import RowsLost, RowsLostError
from multiworld_serving.common.wire.join import FrontendJoinRequest, JoinOffer, JoinRequest, parse_join_request
from multiworld_serving.common.wire.link import Link, LinkLostError
from multiworld_serving.common.wire.protocol import Kind, Received, Reply, WireError, encode, rows_payload
from multiworld_serving.server.leader.metrics import LeaderMetrics
from multiworld_serving.server.leader.pipeline.driver import SchedulerDriver
from multiworld_serving.server.leader.pipeline.inputs import RemoteInput, RequestInput
from multiworld_serving.server.leader.pipeline.requests import NO_OUTPUT, PendingRequest
from multiworld_serving.server.leader.serving import Serving

logger = logging.getLogger(__name__)

_FRONTEND_RANK = 1
_JOIN_WORLD_S = 10.0
_STATE_INTERVAL_S = 1.0
_SCRAPE_S = 2.0
"""Longest wait for the metrics of another frontend."""
_INFORM_S = 60.0
"""Longest wait until a frontend knows the state, and has no request that needs a leader that rejects requests."""


class SessionLeader(Protocol):
    """What the sessions of frontends use of their leader."""

    manager: WorldManager
    driver: SchedulerDriver
    serving: Serving

    @property
    def join_port(self) -> int:
        """The port on which frontends and workers join."""

    def offer_worker(self, request: JoinRequest, host: str) -> JoinOffer:
        """Offer a world to a worker. Raises AskError if it may not join."""

    def snapshot(self) -> PipelineSnapshot:
        """The state for frontends."""


class FrontendSessions:
    """All frontends of a leader.

    Args:
        leader: computes their requests.
    """

    def __init__(
        self, settings: LeaderSettings, model: ServedModel, leader: SessionLeader, metrics: LeaderMetrics
    ) -> None:
        self.name = settings.name
        self.model = model
        self.leader = leader
        self.metrics = metrics
        self._settings = settings
        self._sessions: set[FrontendSession] = set()
        metrics.frontends.set_function(lambda: len(self._sessions))
        self._tasks: set[asyncio.Task[None]] = set()
        self._generations = itertools.count(1)

    def start(self) -> None:
        """Send the state to all frontends once a second from now on, and look for lost requests."""
        self._run_until_closed(self._report())

    def _run_until_closed(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_STATE_INTERVAL_S)
            self.state_changed()
            self.leader.driver.requests.report_lost()

    async def close(self) -> None:
        """Close all links and wait until their sessions have ended."""
        for session in tuple(self._sessions):
            session.link.world.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def answer(self, question: str, host: str) -> bytes:
        """Answer a join request: offer a world, and wait for the process there."""
        try:
            request = parse_join_request(question)
        except WireError as error:
            raise AskError(str(error)) from error
        if isinstance(request, JoinRequest):
            return self.leader.offer_worker(request, host).to_json().encode()
        generation, address = next(self._generations), self._settings.advertised(self.leader.join_port)
        offer = JoinOffer(f"frontend:{request.frontend}:{generation}", generation, address=address)
        self._run_until_closed(self._serve(request, offer))
        return offer.to_json().encode()

    def state_changed(self) -> None:
        """Send the current state to all frontends."""
        if self._sessions:
            data = bytes(encode(Kind.MESSAGE, 0, self.state()))
            for session in self._sessions:
                session.link.send_encoded(data)

    def state(self) -> LeaderState:
        """See `LeaderState`."""
        leader = self.leader
        joined = [each.who for each in self._sessions]
        frontends = tuple(FrontendSnapshot(each.frontend, each.host, each.pid) for each in joined)
        snapshot = replace(
            leader.snapshot(),
            leader=self.name,
            frontends=tuple(sorted(frontends, key=lambda each: each.name)),
        )
        return LeaderState(
            host=socket.gethostname(),
            pid=os.getpid(),
            desired=leader.serving.desired,
            served=leader.serving.served,
            obstacle=leader.serving.obstacle,
            snapshot=snapshot,
        )

    async def inform(self) -> None:
        """Send the state to all frontends. Returns when each knows it and has no request that needs this leader; at most `_INFORM_S`."""
        state = self.state()
        await asyncio.gather(*(each.ask(state, _INFORM_S) for each in tuple(self._sessions)))

    # -- sessions --------------------------------------------------------------------------------------------------------------

    async def _serve(self, request: FrontendJoinRequest, offer: JoinOffer) -> None:
        try:
            address = Address(self._settings.join_host, self.leader.join_port)
            world = await offer.form(self.leader.manager, 0, address, _JOIN_WORLD_S)
        except (JoinError, WorldError, OSError) as error:
            logger.warning("frontend %s has not joined: %s", request.frontend, error)
            return
        for former in [each for each in self._sessions if each.who.frontend == request.frontend]:
            if (former.who.host, former.who.pid) != (
                request.host,
                request.pid,
            ):  # it has been replaced, or two have this name
                logger.warning(
                    "frontend %s of host=%s pid=%d takes the place of the one of host=%s pid=%d; if both run, give each its own --name",
                    *(request.frontend, request.host, request.pid, former.who.host, former.who.pid),
                )
            former.link.fail(f"a frontend with the same --name {request.frontend} has joined from {request.host}")
        session = FrontendSession(self, request, world)
        self._sessions.add(session)
        logger.info(
            "frontend %s joined host=%s pid=%d release=%s",
            *(request.frontend, request.host, request.pid, request.release),
        )
        try:
            session.link.send(msgspec.structs.replace(self.state(), model=self.model))
            ending = await session.link.run()
            logger.info("frontend %s left: %s", request.frontend, ending)
        finally:
            self._sessions.discard(session)
            with contextlib.suppress(WorldError):
                await self.leader.manager.close_world(world.name)
            self.state_changed()

    async def scrape(self, *, others_than: FrontendSession | None) -> Metrics:
        """The metrics of this leader, and those of the other frontends, unless it is None. Those that do not reply in time are left out."""
        texts = [(self.name, (await self.metrics.scrape()).decode())]
        asked = [session for session in self._sessions if others_than not in (None, session)]
        for session, reply in zip(
            asked, await asyncio.gather(*(each.ask(Scrape(), _SCRAPE_S) for each in asked)), strict=True
        ):
            if reply is not None:
                texts.append((session.who.frontend, reply.body.texts[0][1]))
        return Metrics(tuple(texts))


class FrontendSession:
    """The link to one frontend.

    Attributes:
        who: its join request.
    """

    def __init__(self, sessions: FrontendSessions, who: FrontendJoinRequest, world: World) -> None:
        self.who = who
        self.link = Link(world, _FRONTEND_RANK, FRONTEND_PROTOCOL, self._receive, MAX_BYTES)
        self._sessions = sessions

    async def ask(self, body: LeaderState | Scrape, timeout_s: float) -> Received | None:
        """Send a message and wait for its reply; None if there is none in time."""
        with contextlib.suppress(LinkLostError, TimeoutError):
            return await self.link.call(body, timeout_s=timeout_s)
        return None

    def _receive(self, received: Received) -> None:
        number = received.number
        match received.body:
            case Predict() as request:
                self._predict(number, request, received.payload)
            case AdminOperation() as operation:
                self.link.handle(number, self._operate(number, operation))
            case Scrape(others=others):
                self.link.handle(number, self._sessions.scrape(others_than=self if others else None))
            case Follow(desired=desired):
                self._sessions.leader.serving.follow(desired)
            case body:
                raise ValueError(f"unexpected {type(body).__name__} from a frontend")

    def _predict(self, number: int, request: Predict, payload: memoryview) -> None:
        """Start a prediction. Its outcome is sent by a callback: a task for each request would cost more than the rest of it."""
        leader, deadline_s = self._sessions.leader, time.monotonic() + request.timeout_s
        try:
            pending = PendingRequest(
                lambda outcome: self.link.finish(number, partial(_reply_of, outcome)),
                self._inputs(request, payload),
                request.request_id,
                deadline_s,
                request.key,
                relay=request.relay,
                trace=Trace(time.monotonic(), deadline_s, []) if request.traced else None,
                route=request.route,
            )
        except Exception as error:  # noqa: BLE001 - reported to the frontend
            self.link.reply_error(number, error)
            return
        self.link.expect_cancel(number, partial(leader.driver.requests.cancel, pending))
        leader.driver.requests.begin(pending, request.rows)

    def _inputs(self, request: Predict, payload: memoryview) -> RequestInput:
        """The rows of a request, or where they are. Raises ValueError if they are invalid."""
        rows, row_bytes = self._sessions.model.input_rows, request.row_bytes
        if request.relay and request.tensor is not None:
            raise ValueError("an input that is kept, of a request whose tensors are relayed")
        if request.tensor is None:
            return parse_rows(payload, request.rows, rows)
        if (row_bytes > 0) != (rows.row_shape is None) or row_bytes > rows.max_row_bytes:
            raise ValueError(f"a reference to rows of {row_bytes} bytes; expected at most {rows.max_row_bytes}")
        return RemoteInput(self.who.edge, request.tensor, row_bytes)

    async def _operate(self, number: int, asked: AdminOperation) -> Done:
        """Run an administrative operation."""
        serving, version = self._sessions.leader.serving, None
        match asked.operation:
            case "load-version":
                version = await serving.load_version(asked.weights, asked.revision)
            case "unload":
                await serving.unload(asked.revision)
            case "drain" | "undrain" as verb:
                await serving.drain(asked.host, asked.revision, undo=verb == "undrain")
            case "rolling-restart":
                async with aclosing(serving.operations.restart_workers()) as steps:
                    async for step in steps:
                        self.link.reply(number, Step(step), kind=Kind.STEP)
        return Done(version)


def _reply_of(found: Prediction | Exception) -> Reply:
    """Raises the exception that it is, unless the frontend sends the request again."""
    if isinstance(found, RowsLostError):
        return RowsLost(str(found)), b""
    if isinstance(found, Exception):
        raise found
    payload = b"" if found.output is NO_OUTPUT else rows_payload(found.output)
    if len(payload) > MAX_BYTES:
        raise StageError(f"the output has {len(payload)} bytes; at most {MAX_BYTES} can be sent to a frontend")
    return found, payload
