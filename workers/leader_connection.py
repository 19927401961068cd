"""A worker's connection to one leader: request a world, serve in it, and rejoin after every failure."""

import asyncio
import contextlib
import logging
import os
import random
import time
from dataclasses import dataclass
from typing import NoReturn

from multiworld import AskError, Cause, World, WorldError, WorldManager
from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.settings.worker import WorkerSettings
from multiworld_serving.common.wire.join import JoinOffer, JoinRequest
from multiworld_serving.common.wire.protocol import WireError
from multiworld_serving.workers.compute.engine import Engine
from multiworld_serving.workers.exit_timer import EXIT_DEVICE_FAILED, EXIT_STUCK, GRACEFUL_EXIT_S, arm_exit_timer
from multiworld_serving.workers.leader_order import LeaderOrder, LeaderPlace
from multiworld_serving.workers.observability.metrics import WorkerMetrics
from multiworld_serving.workers.session import Session

logger = logging.getLogger(__name__)

_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
"""Pauses between attempts to join: they double from the first to the longest one."""
_BATCH_STUCK_S = 2.0
"""A batch that still runs this long after its world ended counts as stuck. Only a new process helps."""
_WAITS_LOGGED = 3
"""After this many responses in a row without a world, the worker logs why it may have to wait."""
_NOT_READY = (ConnectionRefusedError, BlockingIOError)
"""While a leader loads its model, nothing listens on its port, or the kernel accepts the connection and no frame arrives."""
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


@dataclass(frozen=True)
class WorkerProcess:
    """What the connections of a worker to all its leaders share.

    Attributes:
        stop: set when the process must end. A restart request from a leader sets it too.
        edges: of this process.
    """

    settings: WorkerSettings
    engine: Engine
    stop: asyncio.Event
    order: LeaderOrder
    metrics: WorkerMetrics
    edges: Edges


class LeaderConnection:
    """Joins one leader, serves it, and rejoins.

    Args:
        manager: used by this connection only, because two leaders may use the same world name.
        leader: where it listens; the settings may know another address before each attempt to join.
        number: its position in `settings.leaders`.
    """

    def __init__(self, worker: WorkerProcess, manager: WorldManager, leader: Address, number: int = 0) -> None:
        self._worker = worker
        self._settings = worker.settings
        self._manager = manager
        self._number = number
        self._leader = leader
        self._session: Session | None = None
        self._wait_s = 0.0
        """Minimum pause before the next join, as the leader's last offer said."""
        self._waits = 0
        """How often in a row the leader has offered no world to this worker, which obeys it."""

    @property
    def serving(self) -> bool:
        """Whether this worker has a stage loaded and warmed up for this leader."""
        return self._session is not None and self._session.serving

    async def run(self) -> None:
        """Serve this leader until `stop` is set.

        Raises:
            UserError: the leader rejects the token, and it is the only leader.
            StuckError: the stage hangs, or the GPU has failed.
        """
        staying = asyncio.create_task(self._stay_joined())
        stop = asyncio.create_task(self._worker.stop.wait())
        try:
            await asyncio.wait({staying, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not staying.done() and (session := self._session) is not None and session.serving:
                logger.info("leader=%s leaving: waiting until it has rerouted its batches", self._leader)
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
        """Serve this leader in one world after another. Returns when a world has ended after `stop` was set. Raises as `run`."""
        failures = 0
        while not self._worker.stop.is_set():
            try:
                failures = 0 if await self.serve_once() else failures + 1
            except (AskError, WorldError, WireError, OSError) as error:
                if failures in (0, 10, 100) or failures % 1000 == 0:
                    logger.warning("leader=%s cannot be joined: %s", self._leader, error)
                if failures == 0 and isinstance(error.__cause__, _NOT_READY):
                    logger.info("waiting for leader=%s, which answers when it has loaded its model", self._leader)
                failures += 1
            await self._pause(failures)

    async def serve_once(self) -> bool:
        """Join one world and serve in it until it ends. Returns whether a stage was served."""
        self._leader = self._settings.leaders[self._number]
        with self._worker.order.attempt(self._number):
            offer = await self._ask()
            self._wait_s = offer.wait_ms / 1000
            if not offer.world:
                self._count_wait()
                return False
            self._waits = 0
            world = await offer.join(self._manager, self._leader, self._settings.join_timeout_s)
            with self._worker.order.linked(self._number, offer.leader, world.name) as place:
                return await self._serve_in(world, place)

    def _count_wait(self) -> None:
        """Count a response without a world, and log several in a row once. They are usual if this worker obeys another leader."""
        if self._worker.order.obeyed(self._number):
            return
        self._waits += 1
        if self._waits == _WAITS_LOGGED:
            logger.warning(
                "leader=%s asks this worker to wait: it may be quarantined after failures, or another worker is connected as %s; "
                "see the leader's log",
                *(self._leader, self._settings.name),
            )

    async def _serve_in(self, world: World, place: LeaderPlace) -> bool:
        """Serve in this world until it ends. Returns whether a stage was served."""
        worker = self._worker
        self._session = session = Session(world, worker.engine, worker.edges, worker.stop.set, worker.metrics, place)
        worker.metrics.world_joined()
        try:
            ending = await session.run()
            logger.log(
                logging.DEBUG if ending.cause == Cause.LEFT else logging.INFO,
                "leader=%s world=%s generation=%d ended cause=%s",
                self._leader,
                world.name,
                world.generation,
                ending.cause,
            )
            worker.metrics.world_ended(ending.cause)
            await self._raise_if_stuck(session)
            return session.serving
        finally:
            self._session = None
            worker.metrics.world_left()
            await self._manager.close_world(world.name)

    async def _ask(self) -> JoinOffer:
        settings = self._settings

        async def question() -> str:
            await self._worker.order.until_earlier_leaders_assigned(self._number)
            return JoinRequest(
                settings.name,
                settings.device,
                settings.advertise_host,
                os.getpid(),
                self._worker.order.parts,
                self._worker.order.obeyed(self._number),
                self._worker.edges.holder,
                self._worker.order.world,
            ).to_json()

        try:
            return await JoinOffer.ask(
                *(self._leader, question),
                secret=settings.secret,
                timeout_s=settings.join_timeout_s,
                bind_host=settings.bind_host or "",
            )
        except PermissionError as error:
            message = f"the leader at {self._leader} rejects this worker's token: {error}"
            if len(settings.leaders) > 1:  # keep serving the other leaders
                raise AskError(message) from error
            raise UserError(message) from error

    async def _raise_if_stuck(self, session: Session) -> None:
        """Raise StuckError if the GPU has failed, or the engine is still busy with a job of the ended world.

        A hung batch may be the reason that the world ended. Loading a stage may take up to `join_timeout_s`.
        """
        if session.device_failed:
            _end_stuck(f"{self._settings.device} has failed for this process", EXIT_DEVICE_FAILED)
        began_s = time.monotonic()
        while (job := self._worker.engine.job_of(session)) is not None:
            now_s, longest_s = time.monotonic(), _BATCH_STUCK_S if job.is_batch else self._settings.join_timeout_s
            if now_s - began_s > longest_s:
                what = "computing" if job.is_batch else "loading"
                _end_stuck(f"the stage has been {what} for {now_s - job.begun_s:.1f} s and does not return")
            await asyncio.sleep(0.05)

    async def _pause(self, failures: int) -> None:
        """Wait before the next join: exponential backoff with jitter and a cap, at least as long as the leader said; 0 after serving."""
        longest_s = 0.0
        if failures:
            longest_s = min(_MAX_BACKOFF_S, _MIN_BACKOFF_S * 2 ** min(failures - 1, 20))
        pause_s, self._wait_s = max(longest_s * random.uniform(0.5, 1.0), self._wait_s), 0.0
        await asyncio.sleep(pause_s)
