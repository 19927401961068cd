"""A frontend's link to one leader: join, exchange frames, and join again after every failure."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
import socket
from collections.abc import AsyncGenerator
from typing import Protocol

from multiworld import AskError, BrokenWorldException, Cause, WorldError, WorldManager, ask
from multiworld_serving.common.config import UserError
from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.edges import Edges
from multiworld_serving.common.wire import WORLD_BACKEND, FrontendJoinRequest, JoinOffer, WireError
from multiworld_serving.server.administration import OPERATION_ERRORS, Desired, RestartStep
from multiworld_serving.server.frontends.frames import Frame, FrameKind, FrameLink
from multiworld_serving.server.frontends.messages import (
    Check,
    Done,
    LeaderState,
    Load,
    Metrics,
    Operation,
    Predict,
    Scrape,
)
from multiworld_serving.server.predictor import ServedModel
from multiworld_serving.server.settings import FrontendSettings
from multiworld_serving.server.snapshots import LeaderSnapshot

logger = logging.getLogger(__name__)

_LEADER_RANK = 0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_HEALTHY = frozenset({Cause.LEFT, Cause.ABORTED})
_REQUESTS = {Check: FrameKind.CHECK, Predict: FrameKind.PREDICT, Scrape: FrameKind.SCRAPE}


class LeaderLostError(Exception):
    """The link ended before the reply.

    Attributes:
        failed: whether the leader failed; False if it left, or this process failed.
    """

    def __init__(self, detail: str, *, failed: bool) -> None:
        super().__init__(detail)
        self.failed = failed


class LinkEvents(Protocol):
    """Receives what happens on the links. Implemented by the pool."""

    def accepts(self, model: ServedModel, leader: LeaderLink) -> str | None:
        """Why this leader cannot be used, because it serves another model; None if it can."""

    def on_state(self, leader: LeaderLink) -> None:
        """The leader's state has changed, or the leader was lost."""

    def scrape(self) -> bytes:
        """This frontend's metrics as text."""

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""


class LeaderLink:
    """Joins one leader and stays joined while `run` runs.

    Args:
        manager: used by this link only, because two leaders may use the same world name.
        address: where the leader listens; `settings` may know another one before each attempt to join.
        edges: of this process; None: all tensors go through the leaders.
        number: position of the leader in `settings.leaders`.

    Attributes:
        state: last state reported by the leader; None while disconnected.
        name: of the leader, as known from its last state.
        ambiguous: whether another leader of this frontend has the same name; set by the pool.
        was_ready: whether the leader has been ready since this link was formed.
        relays: whether inputs are sent to the leader, because a worker could not fetch one since this link was formed.
    """

    def __init__(
        self,
        address: Address,
        settings: FrontendSettings,
        manager: WorldManager,
        events: LinkEvents,
        edges: Edges | None = None,
        number: int = 0,
    ) -> None:
        self.address = address
        self._number = number
        self.state: LeaderState | None = None
        self.name: str | None = None
        self.ambiguous = False
        self.was_ready = False
        self.relays = False
        self._edges = edges
        self._settings = settings
        self._manager = manager
        self._events = events
        self._link: FrameLink | None = None
        self._welcome = False
        self._unusable = ""
        """Why this leader cannot be used, as found when the link was formed."""
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Frame]] = {}
        self._steps: dict[int, asyncio.Queue[Frame]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def label(self) -> str | None:
        """Name of the leader that no other leader of this frontend has; None if it was never reached."""
        return f"{self.name}@{self.address}" if self.ambiguous else self.name

    @property
    def usable(self) -> bool:
        """Whether requests may be sent: the leader is connected and does not reject everything."""
        return self.state is not None and self.state.rejection is None

    def snapshot(self) -> LeaderSnapshot:
        """For the status."""
        state = self.state
        if state is None:
            return LeaderSnapshot(str(self.address), "unreachable", self.label)
        pipeline = state.snapshot
        condition = "draining" if pipeline.draining else "unloaded" if pipeline.unloaded else "not_ready"
        ready = state.ready and not state.obstacle
        return LeaderSnapshot(
            str(self.address),
            "ready" if ready else condition,  # type: ignore[arg-type]  # mypy widens the literals
            self.label,
            state.host,
            state.pid,
            state.version.name,
            pipeline.queue_depth,
            pipeline.requests_in_flight,
            pipeline.uptime_s,
            state.obstacle,
        )

    # -- requests --------------------------------------------------------------------------------------------------------------

    async def request(
        self, body: Check | Predict | Scrape, payload: memoryview | bytes = b"", *, timeout_s: float
    ) -> Frame:
        """Send a request and wait for its reply. Cancelling withdraws it.

        Raises:
            RequestRejected: the leader rejects it.
            LeaderLostError: the link ended before the reply.
            TimeoutError: no reply within `timeout_s`.
        """
        link = self._link
        if link is None:
            raise LeaderLostError("not connected", failed=False)
        number = next(self._numbers)
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                await link.wait_writable()
                link.send(_REQUESTS[type(body)], number, body, payload)
                return await future
        finally:
            del self._pending[number]
            if future.cancelled() or not future.done():  # the reply is not needed any more
                link.send(FrameKind.CANCEL, number)

    async def operate(self, operation: Operation) -> AsyncGenerator[RestartStep | Done, None]:
        """Run an administrative operation; yields its steps, and its result at the end. Closing it cancels the operation.

        Raises:
            LeaderLostError: the link ended before the result.
            InvalidWeightsError, OperationInProgressError, VersionFailedError, RestartFailedError: the operation failed.
        """
        link = self._link
        if link is None:
            raise LeaderLostError("not connected", failed=False)
        number = next(self._numbers)
        steps = self._steps[number] = asyncio.Queue()
        link.send(FrameKind.OPERATION, number, operation)
        finished = False
        try:
            while not finished:
                frame = await steps.get()
                finished = frame.kind is not FrameKind.STEP
                if frame.kind is FrameKind.REJECTED:
                    raise LeaderLostError("the link ended", failed=True)
                if finished and frame.body.error is not None:
                    raise OPERATION_ERRORS.get(frame.body.kind, RuntimeError)(frame.body.error)
                yield frame.body
        finally:
            del self._steps[number]
            if not finished:
                link.send(FrameKind.CANCEL, number)

    def follow(self, desired: Desired) -> None:
        """Tell the leader what another one serves."""
        if self._link is not None:
            self._link.send(FrameKind.FOLLOW, body=desired)

    def send_load(self, load: Load) -> None:
        """See `FrameKind.LOAD`."""
        if self._link is not None:
            self._link.send(FrameKind.LOAD, body=load)

    # -- the link --------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Stay joined to the leader until cancelled.

        Raises:
            UserError: the leader rejects the token, and it is the only leader.
        """
        failures = 0
        while True:
            try:
                await self._serve_once()
                failures = 0
            except PermissionError as error:
                message = f"the leader at {self.address} rejects this frontend's token: {error}"
                if len(self._settings.leaders) == 1 and self.name is None:
                    raise UserError(message) from error
                failures = self._log_failure(failures, message)
            except (AskError, WorldError, WireError, OSError) as error:
                failures = self._log_failure(failures, str(error))
            longest_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(failures, 10))
            await asyncio.sleep(longest_s * random.uniform(0.5, 1.0))

    def _log_failure(self, failures: int, message: str) -> int:
        """Log a failure to join, unless it repeats. Returns the number of failures in a row."""
        if failures in (0, 10, 100) or failures % 1000 == 0:
            logger.warning("leader=%s cannot be joined: %s", self.address, message)
        return failures + 1

    async def _serve_once(self) -> None:
        """Join and stay until the link ends. Raises an error if the leader could not be used."""
        self.address = self._settings.leader_at(self._number, self.address)
        offer = await self._ask()
        address = offer.joins_at(self.address)
        world = await self._manager.initialize_world(
            *(offer.world, 1, 2, WORLD_BACKEND),
            addr=address.host,
            port=address.port,
            generation=offer.generation,
            timeout=min(15.0, self._settings.join_timeout_s),
        )
        self._welcome, self._unusable = False, ""
        self._link = link = FrameLink(world, _LEADER_RANK, self._on_frame)
        failed, detail = False, "this frontend stops"
        try:
            ending = await link.run()
            detail = str(ending)
            if self.state is None:
                raise WireError(self._unusable or f"the link ended before the leader sent its state: {detail}")
            failed = (
                isinstance(ending, BrokenWorldException)
                and ending.rank == _LEADER_RANK
                and ending.cause not in _HEALTHY
            )
            log = logger.warning if failed else logger.info
            log("leader=%s name=%s the link ended: %s", self.address, self.name, detail)
        finally:
            self._on_lost(detail, failed=failed)
            with contextlib.suppress(WorldError):
                await self._manager.close_world(world.name)
                self._manager.remove_world(world.name)

    async def _ask(self) -> JoinOffer:
        settings = self._settings
        edge = "" if self._edges is None else self._edges.holder
        request = FrontendJoinRequest(settings.name, socket.gethostname(), os.getpid(), edge)
        answer = await ask(
            self.address.host,
            self.address.port,
            request.to_json(),
            secret=settings.secret,
            timeout_s=settings.join_timeout_s,
        )
        return JoinOffer.from_json(answer)

    def _on_frame(self, frame: Frame) -> None:
        try:
            self._handle(frame)
        except ValueError as error:
            if self.state is not None or self._link is None:
                raise
            # The leader has another release or another model. It is no failure of the world, which would be logged at each attempt.
            self._unusable = self._unusable or f"{type(error).__name__}: {error!s:.300}"
            self._link.world.close()

    def _handle(self, frame: Frame) -> None:
        body = frame.body  # raises ValueError if it is invalid
        match frame.kind:
            case FrameKind.PREDICTION | FrameKind.ADMITTED | FrameKind.METRICS | FrameKind.REJECTED:
                self._on_reply(frame)
            case FrameKind.STATE if self._welcome:
                self.state = body
                self.name = self.state.leader
                self.was_ready |= self.state.ready
                self._events.on_state(self)
                if frame.number:
                    self._send(FrameKind.DONE, frame.number, Done())
            case FrameKind.STEP | FrameKind.DONE:
                if (steps := self._steps.get(frame.number)) is not None:
                    steps.put_nowait(frame)
            case FrameKind.SCRAPE:
                self._send(FrameKind.METRICS, frame.number, Metrics(()), self._events.scrape())
            case FrameKind.QUIESCE:
                task = asyncio.create_task(self._quiesce(frame.number))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case FrameKind.WELCOME:
                if (why := self._events.accepts(body, self)) is not None:
                    raise ValueError(why)
                self._welcome = True
            case _:
                raise ValueError(f"unexpected {frame.kind.name} from a leader")

    def _send(self, kind: FrameKind, number: int, body: Done | Metrics, payload: bytes = b"") -> None:
        if self._link is not None:
            self._link.send(kind, number, body, payload)

    async def _quiesce(self, number: int) -> None:
        await self._events.wait_idle()
        self._send(FrameKind.DONE, number, Done())

    def _on_reply(self, frame: Frame) -> None:
        future = self._pending.get(frame.number)
        if future is None or future.done():
            return  # the request was cancelled
        if frame.kind is FrameKind.REJECTED:
            future.set_exception(frame.body.error())
        else:
            future.set_result(frame)

    def _on_lost(self, detail: str, *, failed: bool) -> None:
        self._link, self.state, self.was_ready, self.relays = None, None, False, False
        for future in self._pending.values():
            if not future.done():
                future.set_exception(LeaderLostError(detail, failed=failed))
        for steps in self._steps.values():
            steps.put_nowait(Frame(FrameKind.REJECTED, 0))
        for task in self._tasks:
            task.cancel()
        self._events.on_state(self)
