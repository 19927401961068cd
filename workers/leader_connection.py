"""Chooses and joins the leader of a worker: the first reachable one, the next one after a loss, an earlier one when it has recovered."""

import asyncio
import contextlib
import logging
import os
import random
import time
from typing import NamedTuple, NoReturn

from multiworld import AskError, Cause, WorldError, WorldManager
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.settings.worker import WorkerSettings
from multiworld_serving.common.wire.join import MAX_HELD, JoinOffer, JoinRequest, log_failure
from multiworld_serving.common.wire.protocol import WireError
from multiworld_serving.workers.compute.engine import Engine
from multiworld_serving.workers.devices import pci_address
from multiworld_serving.workers.exit_timer import EXIT_DEVICE_FAILED, EXIT_STUCK, GRACEFUL_EXIT_S, arm_exit_timer
from multiworld_serving.workers.observability.metrics import WorkerMetrics
from multiworld_serving.workers.session import Session

logger = logging.getLogger(__name__)

_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
"""Pauses between attempts to join: they double from the first to the longest one."""
_BATCH_STUCK_S = 2.0
"""A batch that still runs this long after its world ended counts as stuck. Only a new process helps."""
_WAITS_LOGGED = 3
"""After this many responses in a row without a world, the worker logs why it may have to wait."""
_STAYS = (Cause.LEFT, Cause.ABORTED)
"""After these causes, which the leader decides, it is asked first again."""
_POLL_S = 0.01
_LOOK_S = 0.25
"""Pause between two looks for a better leader."""
DRAIN_S = 30.0
"""On shutdown, how long to wait for the leader to reroute this worker's batches."""


class StuckError(Exception):
    """The stage hangs, or the GPU has failed. The process exits, because only a new one can recover.

    Attributes:
        status: the exit status.
    """

    def __init__(self, reason: str, status: int = EXIT_STUCK) -> None:
        super().__init__(reason)
        self.status = status


def _end_stuck(reason: str, status: int = EXIT_STUCK) -> NoReturn:
    """Arm the exit timer, in case the orderly exit hangs as well, and raise StuckError."""
    arm_exit_timer(GRACEFUL_EXIT_S)
    raise StuckError(reason, status)


class _Found(NamedTuple):
    """A leader that offers a world."""

    number: int
    offer: JoinOffer


class LeaderConnection:
    """Joins one leader, serves it, and joins the next one when it is lost.

    A leader is lost when its world breaks: the leaders after it in `settings.leaders` are asked first then, because it may be frozen. While
    an earlier leader is missing, the worker asks it again and again whether it may move there. It leaves when that leader has agreed, and
    finishes its batches before.

    Args:
        stop: set when the process must end. A restart request from a leader sets it too.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        edges: Edges,
        manager: WorldManager,
        metrics: WorkerMetrics,
        stop: asyncio.Event,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._edges = edges
        self._manager = manager
        self._metrics = metrics
        self._stop = stop
        self._session: Session | None = None
        self._better: _Found | None = None
        """Where this worker moves to when its session has ended."""
        self._failures = [0] * len(settings.leaders)
        """How often in a row each leader could not be asked or joined."""
        self._wait_s = 0.0
        """Minimum pause before the next join, as the last offer said."""
        self._waits = 0
        """How often in a row a leader has asked this worker to wait."""

    @property
    def serving(self) -> bool:
        """Whether this worker has a stage loaded and warmed up for a leader."""
        return self._session is not None and self._session.serving

    async def run(self) -> None:
        """Serve until `stop` is set.

        Raises:
            UserError: the leader rejects the token, and it is the only leader.
            StuckError: the stage hangs, or the GPU has failed.
        """
        staying = asyncio.create_task(self._stay_joined())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({staying, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not staying.done() and (session := self._session) is not None and session.serving:
                logger.info("leaving: waiting until the leader has rerouted its batches")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN_S):
                        session.leave()
                        await asyncio.wait({staying})
        finally:
            stop.cancel()
            staying.cancel()
            await asyncio.wait({staying})
        if not staying.cancelled():
            staying.result()

    async def _stay_joined(self) -> None:
        """Serve in one world after another. Returns when a world has ended after `stop` was set. Raises as `run`."""
        first, failures = 0, 0
        while not self._stop.is_set():
            found, self._better = self._better or await self._find(first), None
            served = False
            if found is not None:
                try:
                    cause, served = await self._serve(found)
                    first = found.number if cause in _STAYS else found.number + 1
                except (WorldError, WireError, OSError) as error:
                    self._log_failure(found.number, error)
                    first = found.number + 1
            failures = 0 if served else failures + 1
            await self._pause(failures)

    # -- finding a leader ----------------------------------------------------------------------------------------------------

    async def _find(self, first: int) -> _Found | None:
        """The first leader that offers a world; asks this one first and the one before it last."""
        count = len(self._settings.leaders)
        numbers, last = [(first + step) % count for step in range(count)], None
        for number in numbers:
            offer = await self._ask(number)
            if offer is not None and not offer.elsewhere:
                return self._accept(number, offer)
            if offer is not None and last is None:
                last = number
        if last is not None and (offer := await self._ask(last, alone=True)) is not None:
            return self._accept(last, offer)
        return None

    def _accept(self, number: int, offer: JoinOffer) -> _Found | None:
        """None if the leader asks this worker to wait. Logs it once when it does so several times."""
        if offer.world:
            self._waits = 0
            return _Found(number, offer)
        self._wait_s, self._waits = offer.wait_ms / 1000, self._waits + 1
        if self._waits == _WAITS_LOGGED:
            logger.warning(
                "leader=%s asks this worker to wait: its host is drained, it is quarantined after failures, or another worker is "
                "connected as %s; see the leader's log",
                *(self._settings.leaders[number], self._settings.name),
            )
        return None

    async def _find_better(self, number: int, session: Session) -> None:
        """Look for an earlier leader that takes this worker, or for any other one if this one asks for it; then leave."""
        while self._better is None:
            await asyncio.sleep(_LOOK_S)
            others = range(len(self._settings.leaders)) if session.released else range(number)
            for other in others if session.serving else ():
                offer = await self._ask(other, serves=not session.released) if other != number else None
                if offer is not None and offer.world:
                    logger.info("moving to leader=%s", self._settings.leaders[other])
                    self._better = _Found(other, offer)
                    session.leave()
                    break

    async def _ask(self, number: int, *, serves: bool = False, alone: bool = False) -> JoinOffer | None:
        """The answer of a leader; None if it does not answer in time or refuses. Raises UserError."""
        settings = self._settings
        leader, is_only = settings.leaders[number], len(settings.leaders) == 1
        request = JoinRequest(
            *(settings.name, settings.device, settings.advertise_host, os.getpid()),
            held=tuple(self._engine.stages.keys())[:MAX_HELD],
            serves=serves,
            alone=alone,
            edge=self._edges.holder,
            gpu=pci_address(self._engine.device),
        )
        try:
            offer = await JoinOffer.ask(
                *(leader, request.to_json()),
                secret=settings.secret,
                timeout_s=settings.join_timeout_s if is_only else settings.heartbeat_timeout_s,
                bind_host=settings.bind_host or "",
            )
        except PermissionError as error:
            message = f"the leader at {leader} rejects this worker's token: {error}"
            if is_only:
                raise UserError(message) from error
            self._log_failure(number, AskError(message))
        except (AskError, WireError, OSError) as error:
            self._log_failure(number, error)
        else:
            self._failures[number] = 0
            return offer
        return None

    def _log_failure(self, number: int, error: Exception) -> None:
        """Log that a leader cannot be joined, unless that repeats."""
        log_failure(self._settings.leaders[number], error, self._failures[number])
        self._failures[number] += 1

    # -- serving -------------------------------------------------------------------------------------------------------------

    async def _serve(self, found: _Found) -> tuple[Cause, bool]:
        """Join the offered world and serve in it until it ends. Returns why it ended, and whether a stage was served."""
        leader = self._settings.leaders[found.number]
        world = await found.offer.join(self._manager, leader, self._settings.join_timeout_s)
        self._session = session = Session(world, self._engine, self._edges, self._stop.set, self._metrics)
        self._metrics.world_joined()
        looking = asyncio.create_task(self._find_better(found.number, session))
        try:
            ending = await session.run()
            logger.log(
                logging.DEBUG if ending.cause == Cause.LEFT else logging.INFO,
                "leader=%s world=%s generation=%d ended cause=%s",
                leader,
                world.name,
                world.generation,
                ending.cause,
            )
            self._metrics.world_ended(ending.cause)
            await self._raise_if_stuck(session)
            return ending.cause, session.serving
        finally:
            looking.cancel()
            self._session = None
            self._metrics.world_left()
            await self._manager.close_world(world.name)

    async def _raise_if_stuck(self, session: Session) -> None:
        """Raise StuckError if the GPU has failed, or the engine is still busy with a job of the ended world.

        A hung batch may be the reason that the world ended. Loading a stage may take up to `join_timeout_s`.
        """
        if session.device_failed:
            _end_stuck(f"{self._settings.device} has failed for this process", EXIT_DEVICE_FAILED)
        began_s = time.monotonic()
        while (job := self._engine.job_of(session)) is not None:
            now_s, longest_s = time.monotonic(), _BATCH_STUCK_S if job.is_batch else self._settings.join_timeout_s
            if now_s - began_s > longest_s:
                what = "computing" if job.is_batch else "loading"
                _end_stuck(f"the stage has been {what} for {now_s - job.begun_s:.1f} s and does not return")
            await asyncio.sleep(_POLL_S)

    async def _pause(self, failures: int) -> None:
        """Wait before the next join: exponential backoff with jitter and a cap, at least as long as the leader said; 0 after serving."""
        longest_s = 0.0
        if failures:
            longest_s = min(_MAX_BACKOFF_S, _MIN_BACKOFF_S * 2 ** min(failures - 1, 20))
        pause_s, self._wait_s = max(longest_s * random.uniform(0.5, 1.0), self._wait_s), 0.0
        await asyncio.sleep(pause_s)
