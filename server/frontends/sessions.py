"""The leader's side of the frontends: admits them, and answers the frames of each in a session."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from multiworld import JoinError, World, WorldError, WorldManager
from multiworld_serving.common.wire import WORLD_BACKEND, EdgeState, FrontendJoinRequest, JoinOffer
from multiworld_serving.models.errors import ModelError
from multiworld_serving.server.administration import OPERATION_ERRORS
from multiworld_serving.server.errors import InputUnreachableError, RequestRejected, StageError
from multiworld_serving.server.frontends.frames import MAX_BYTES, NOTHING, Frame, FrameKind, FrameLink, encode
from multiworld_serving.server.frontends.messages import (
    Check,
    Done,
    LeaderState,
    Operation,
    Predict,
    PredictReply,
    Rejection,
    Scrape,
    parse_rows,
    rows_payload,
)
from multiworld_serving.server.frontends.messages import Metrics as MetricsBody
from multiworld_serving.server.leader import Leader
from multiworld_serving.server.observability.leader_metrics import LeaderMetrics
from multiworld_serving.server.observability.request_traces import current_span, remote_span
from multiworld_serving.server.pipeline.batch_tensors import InputRef, InputRow
from multiworld_serving.server.predictor import Prediction, ServedModel
from multiworld_serving.server.snapshots import FrontendSnapshot, Transport

logger = logging.getLogger(__name__)

_FRONTEND_RANK = 1
_JOIN_WORLD_S = 10.0
_STATE_INTERVAL_S = 1.0
_SCRAPE_S = 2.0
"""Longest wait for the metrics of another frontend."""
_QUIESCE_S = 60.0
"""Longest wait until a frontend has no request that needs a leader that is being unloaded."""
_REPLY_S = 5.0
"""Longest wait until a frontend has confirmed a state."""
_RECENT_S = 1.0
"""How long a frontend's report of its number of requests in preparation is used."""


class FrontendSessions:
    """All frontends of a leader. Implements `RemoteOpenRequests`.

    Args:
        manager: hosts the worlds; the leader's.
        address: where it listens.
        advertised: HOST:PORT at which frontends join; empty = the address that they connected to.
    """

    def __init__(
        self,
        name: str,
        model: ServedModel,
        leader: Leader,
        metrics: LeaderMetrics,
        manager: WorldManager,
        address: tuple[str, int],
        advertised: str = "",
    ) -> None:
        self.name = name
        self.model = model
        self.leader = leader
        self.metrics = metrics
        self._manager = manager
        self._host, self._port = address
        self._advertised = advertised
        self._sessions: set[FrontendSession] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._generations = itertools.count(1)

    async def run(self) -> None:
        """Send the state to all frontends once a second."""
        while True:
            await asyncio.sleep(_STATE_INTERVAL_S)
            self.state_changed()

    async def close(self) -> None:
        """Close all links and wait until their sessions have ended."""
        for session in tuple(self._sessions):
            session.link.world.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def offer(self, request: FrontendJoinRequest) -> JoinOffer:
        """Offer a world to a frontend, and wait for it there."""
        generation = next(self._generations)
        world = f"frontend:{request.frontend}:{generation}"
        task = asyncio.create_task(self._serve(request, world, generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return JoinOffer(world, generation, address=self._advertised)

    def state_changed(self) -> None:
        """Send the current state to all frontends."""
        if self._sessions:
            data = bytes(encode(FrameKind.STATE, 0, self.state()))
            for session in self._sessions:
                session.link.send_encoded(data)

    def state(self) -> LeaderState:
        """See `FrameKind.STATE`."""
        leader = self.leader
        closed = leader.closed_error()
        frontends = tuple(session.snapshot() for session in self._sessions)
        snapshot = replace(
            leader.snapshot(),
            leader=self.name,
            frontends=tuple(sorted(frontends, key=lambda each: each.name)),
            edges=leader.edges((each.who.frontend, each.who.edge, each.edges) for each in self._sessions),
        )
        return LeaderState(
            leader=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=leader.version,
            desired=leader.desired,
            served=leader.served,
            obstacle=leader.obstacle,
            ready=leader.ready,
            rejection=None if closed is None else Rejection.of(closed),
            snapshot=snapshot,
        )

    def ahead(self, session: FrontendSession) -> int:
        """Requests in preparation at all frontends, as reported recently."""
        recent_s = time.monotonic() - _RECENT_S
        return sum(each.ahead for each in self._sessions if each is session or each.ahead_s > recent_s)

    # -- RemoteOpenRequests --------------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Requests in flight at the frontends, as reported; those that this leader computes are counted there too."""
        return 0

    async def wait_idle(self) -> None:
        """Wait until every frontend has sent all the requests that it meant for this leader; at most `_QUIESCE_S`."""
        self.state_changed()
        await asyncio.gather(*(each.ask(FrameKind.QUIESCE, timeout_s=_QUIESCE_S) for each in tuple(self._sessions)))

    async def sync_state(self) -> None:
        """Wait until every frontend knows the current state; at most `_REPLY_S`."""
        state = self.state()
        await asyncio.gather(*(each.ask(FrameKind.STATE, state, _REPLY_S) for each in tuple(self._sessions)))

    # -- sessions --------------------------------------------------------------------------------------------------------------

    async def _serve(self, request: FrontendJoinRequest, world_name: str, generation: int) -> None:
        try:
            world = await self._manager.initialize_world(
                *(world_name, 0, 2, WORLD_BACKEND),
                addr=self._host,
                port=self._port,
                generation=generation,
                timeout=_JOIN_WORLD_S,
            )
        except (JoinError, WorldError, OSError) as error:
            logger.warning("frontend %s has not joined: %s", request.frontend, error)
            return
        for former in [each for each in self._sessions if each.who.frontend == request.frontend]:
            former.link.fail("a frontend with the same name has joined")
        session = FrontendSession(self, request, world)
        self._sessions.add(session)
        self.metrics.frontends.set(len(self._sessions))
        logger.info(
            "frontend %s joined host=%s pid=%d release=%s",
            *(request.frontend, request.host, request.pid, request.release),
        )
        try:
            ending = await session.run()
            logger.info("frontend %s left: %s", request.frontend, ending)
        finally:
            self._sessions.discard(session)
            if request.edge:
                self.leader.edge_routing.forget(request.edge, request.frontend)
            self.metrics.frontends.set(len(self._sessions))
            with contextlib.suppress(WorldError):
                await self._manager.close_world(world_name)
                self._manager.remove_world(world_name)
            self.state_changed()

    async def scrape_others(self, asking: FrontendSession) -> list[tuple[str, str]]:
        """Name and metrics of the other frontends; those that do not reply in time are left out."""
        others = [session for session in self._sessions if session is not asking]
        found = await asyncio.gather(*(session.scrape() for session in others))
        return [(session.who.frontend, text) for session, text in zip(others, found, strict=True) if text]


class FrontendSession:
    """The link to one frontend.

    Attributes:
        who: its join request.
        ahead: its number of requests in preparation, as reported at `ahead_s`.
        edges: on which it fetches, as it reported.
    """

    def __init__(self, sessions: FrontendSessions, who: FrontendJoinRequest, world: World) -> None:
        self.who = who
        self.link = FrameLink(world, _FRONTEND_RANK, self._on_frame)
        self.ahead, self.ahead_s = 0, 0.0
        self.edges: tuple[EdgeState, ...] = ()
        self._connections, self._requests = 0, 0
        self._sessions = sessions
        self._tasks: dict[int, asyncio.Future[Any]] = {}
        """Predictions and operations in progress, by number."""
        self._pending: dict[int, asyncio.Future[Frame | None]] = {}
        self._numbers = itertools.count(1)

    async def run(self) -> Exception:
        """Serve the frontend until its link ends; returns why it ended."""
        self.link.send(FrameKind.WELCOME, body=self._sessions.model)
        self.link.send(FrameKind.STATE, body=self._sessions.state())
        try:
            return await self.link.run()
        finally:
            self.link.end()
            for task in tuple(self._tasks.values()):
                task.cancel()
            for pending in self._pending.values():
                _complete(pending, None)

    def snapshot(self) -> FrontendSnapshot:
        """For the status."""
        who = self.who
        transport: Transport = "edges" if who.edge else "relay"
        return FrontendSnapshot(who.frontend, who.host, who.pid, self._connections, self._requests, transport)

    async def ask(self, kind: FrameKind, body: Any = NOTHING, timeout_s: float = _REPLY_S) -> Frame | None:
        """Send a request and wait for its reply; None if the link ends, or the time is over, before."""
        number = next(self._numbers)
        pending: asyncio.Future[Frame | None] = asyncio.get_running_loop().create_future()
        self._pending[number] = pending
        self.link.send(kind, number, body)
        try:
            async with asyncio.timeout(timeout_s):
                return await pending
        except TimeoutError:
            return None
        finally:
            self._pending.pop(number, None)

    async def scrape(self) -> str:
        """The frontend's metrics as text; empty if it does not reply in time."""
        reply = await self.ask(FrameKind.SCRAPE, Scrape(), _SCRAPE_S)
        return "" if reply is None else str(reply.payload, "utf-8")

    def _on_frame(self, frame: Frame) -> None:
        body = frame.body  # raises ValueError if it is invalid
        match frame.kind:
            case FrameKind.CHECK:
                self._check(frame.number, body)
            case FrameKind.PREDICT:
                self._predict(frame)
            case FrameKind.CANCEL:
                if (task := self._tasks.get(frame.number)) is not None:
                    task.cancel()
            case FrameKind.OPERATION:
                self._start(frame.number, asyncio.create_task(self._operate(frame.number, body)))
            case FrameKind.SCRAPE:
                self._start(frame.number, asyncio.create_task(self._scrape(frame.number, body)))
            case FrameKind.FOLLOW:
                self._sessions.leader.follow(body)
            case FrameKind.LOAD:
                self._connections, self._requests, self.edges = body.connections, body.requests, body.edges
            case FrameKind.DONE | FrameKind.METRICS:
                if (pending := self._pending.get(frame.number)) is not None:
                    _complete(pending, frame)
            case _:
                raise ValueError(f"unexpected {frame.kind.name} from a frontend")

    def _start(self, number: int, work: asyncio.Future[Any]) -> None:
        if number in self._tasks:
            work.cancel()
            raise ValueError(f"the number {number} is in use")
        self._tasks[number] = work
        work.add_done_callback(lambda _: self._tasks.pop(number, None))

    def _check(self, number: int, check: Check) -> None:
        self.ahead, self.ahead_s = check.ahead, time.monotonic()
        deadline_s = time.monotonic() + check.timeout_s
        rejection = self._sessions.leader.rejection(deadline_s, self._sessions.ahead(self))
        if rejection is None:
            self.link.send(FrameKind.ADMITTED, number)
        else:
            self.link.send(FrameKind.REJECTED, number, Rejection.of(rejection))

    def _predict(self, frame: Frame) -> None:
        """Start a prediction. Its outcome is sent by a callback: a task for each request would cost more than the rest of it."""
        try:
            prediction = self._begin(frame)
        except Exception as error:  # noqa: BLE001 - reported to the frontend
            self._send_failure(frame.number, error)
            return
        self._start(frame.number, prediction)
        requests = self._sessions.leader.open_requests
        requests.begin()
        prediction.add_done_callback(lambda _: requests.end())
        prediction.add_done_callback(partial(self._on_prediction, frame.number))

    def _begin(self, frame: Frame) -> asyncio.Future[Prediction]:
        """Hand a request to the leader."""
        request: Predict = frame.body
        leader, who = self._sessions.leader, self.who
        deadline_s = time.monotonic() + request.timeout_s
        if request.unreachable is not None:
            leader.edge_routing.relay(request.unreachable, who.frontend)
        fetcher = who.frontend if who.edge and request.fetches else None
        span = None if request.span is None else remote_span(*(int(each, 16) for each in request.span))
        token = current_span.set(span)
        try:
            return leader.begin(
                self._inputs(request, frame.payload),
                deadline_s=deadline_s,
                request_id=request.request_id,
                fetcher=fetcher,
                key=request.key,
            )
        finally:
            current_span.reset(token)

    def _on_prediction(self, number: int, prediction: asyncio.Future[Prediction]) -> None:
        if prediction.cancelled():
            return
        if (error := prediction.exception()) is not None:
            self._send_failure(number, error)
            return
        found = prediction.result()
        payload = rows_payload(found.output)
        if len(payload) > MAX_BYTES:
            error = StageError(f"the output has {len(payload)} bytes; at most {MAX_BYTES} can be sent to a frontend")
            self._send_failure(number, error)
            return
        self.link.send(FrameKind.PREDICTION, number, PredictReply.of(found), payload)

    def _send_failure(self, number: int, error: BaseException) -> None:
        if isinstance(error, RequestRejected | InputUnreachableError):
            self.link.send(FrameKind.REJECTED, number, Rejection.of(error))
        else:
            logger.error("request failed number=%d frontend=%s", number, self.who.frontend, exc_info=error)
            self.link.send(FrameKind.REJECTED, number, Rejection.of(None))

    def _inputs(self, request: Predict, payload: memoryview) -> Sequence[InputRow]:
        """The rows of a request, or where they are. Raises ValueError if they are invalid."""
        rows, row_bytes = self._sessions.model.input_rows, request.row_bytes
        if request.tensor is None:
            self._sessions.metrics.relayed_from_frontends.inc(len(payload))
            return parse_rows(payload, request.rows, rows).unbind()
        if not self.who.edge:
            raise ValueError("a reference to an input of a frontend that announced no edge")
        if (row_bytes > 0) != (rows.row_shape is None) or row_bytes > rows.max_row_bytes:
            raise ValueError(f"a reference to rows of {row_bytes} bytes; expected at most {rows.max_row_bytes}")
        return [InputRef(self.who.edge, request.tensor, row, row_bytes) for row in range(request.rows)]

    async def _operate(self, number: int, asked: Operation) -> None:
        """Run an administrative operation and report its outcome."""
        leader, result = self._sessions.leader, Done()
        try:
            match asked.operation:
                case "load-version":
                    result = Done(await leader.load_version(asked.weights, asked.revision))
                case "unload":
                    await leader.unload(asked.revision)
                case "rolling-restart":
                    async with aclosing(leader.restart_workers()) as steps:
                        async for step in steps:
                            self.link.send(FrameKind.STEP, number, step)
        except ModelError as error:
            result = Done(error=str(error), kind="invalid_weights")
        except tuple(OPERATION_ERRORS.values()) as error:
            kind = next(name for name, cls in OPERATION_ERRORS.items() if isinstance(error, cls))
            result = Done(error=str(error), kind=kind)
        except Exception as error:
            logger.exception("an operation of frontend %s failed", self.who.frontend)
            result = Done(error=f"{type(error).__name__}: {error}", kind="internal")
        self.link.send(FrameKind.DONE, number, result)

    async def _scrape(self, number: int, asked: Scrape) -> None:
        texts = [(self._sessions.name, (await self._sessions.metrics.scrape()).decode())]
        if asked.others:
            texts += await self._sessions.scrape_others(self)
        sizes = tuple((name, len(text.encode())) for name, text in texts)
        payload = "".join(text for _, text in texts).encode()
        self.link.send(FrameKind.METRICS, number, MetricsBody(sizes), payload)


def _complete(pending: asyncio.Future[Frame | None], frame: Frame | None) -> None:
    if not pending.done():  # the waiter may have been cancelled
        pending.set_result(frame)
