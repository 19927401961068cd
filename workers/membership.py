"""A worker's tie to one leader: ask it for a world, serve in it, and come back after every failure."""

import asyncio
import contextlib
import logging
import os
import random
import socket

from config import UserError
from multiworld import AskError, WorldError, WorldManager, ask
from wire import JoinOffer, JoinRequest, WireError
from workers.engine import Engine
from workers.metrics import WorkerMetrics
from workers.session import Session
from workers.settings import Address, WorkerSettings

logger = logging.getLogger(__name__)

_STUCK_S = 2.0
"""A stage that still computes so long after its world was broken for hanging will not come back: only a new process helps."""
_DRAIN_S = 30.0


class StuckError(Exception):
    """The stage computes and does not come back. Nothing but a new process helps, whatever other leaders we have."""


class Membership:
    """Joins one leader, serves it, rejoins. Several memberships share an engine, and nothing else.

    Args:
        manager: of this membership alone: two leaders may give worlds the same name.
        stop: set when the process is to end; a leader that asks for a restart sets it too.
    """

    def __init__(
        self,
        leader: Address,
        settings: WorkerSettings,
        engine: Engine,
        manager: WorldManager,
        stop: asyncio.Event,
        metrics: WorkerMetrics,
    ) -> None:
        self._leader = leader
        self._settings = settings
        self._engine = engine
        self._manager = manager
        self._stop = stop
        self._metrics = metrics
        self._session: Session | None = None
        self._wait_s = 0.0
        """How long the leader has told us to stay away."""

    async def keep_serving(self) -> None:
        """Serve this leader until `stop`.

        Raises:
            UserError: the leader does not take our token.
            StuckError: the stage hangs.
        """
        failures = 0
        while not self._stop.is_set():
            served = False
            stay = asyncio.create_task(self._stay())
            try:
                await self._end_or_stop(stay)
                served = stay.result()
            except asyncio.CancelledError:
                if not stay.cancelled():  # it is us who are cancelled
                    stay.cancel()
                    raise
                break  # we cancelled it ourselves, to stop
            except (AskError, WorldError, WireError, OSError) as error:
                if failures in (0, 10, 100) or failures % 1000 == 0:
                    logger.warning("leader=%s cannot be joined: %s", self._leader, error)
            failures = 0 if served else failures + 1
            await self._pause(failures)

    async def _stay(self) -> bool:
        """Join one world and serve in it until it ends. Gives whether it came to serving."""
        offer = await self._ask()
        self._wait_s = offer.wait_ms / 1000
        if not offer.world:
            return False
        host, port = self._leader.host, self._leader.port
        world = await self._manager.initialize_world(
            offer.world, 1, 2, addr=host, port=port, epoch=offer.epoch, timeout=self._settings.join_timeout_s
        )
        self._session = session = Session(world, self._engine, self._stop.set, self._metrics)
        self._metrics.world_joined()
        try:
            ending = await session.run()
            logger.info(
                "leader=%s world=%s epoch=%d ended cause=%s", self._leader, world.name, world.epoch, ending.cause
            )
            self._metrics.world_ended(ending.cause)
            await self._raise_if_stuck(session)
            return session.serving
        finally:
            self._session = None
            self._metrics.world_gone()
            await self._manager.close_world(world.name)

    async def _ask(self) -> JoinOffer:
        request = JoinRequest(self._settings.name, self._settings.device, socket.gethostname(), os.getpid())
        try:
            answer = await ask(
                self._leader.host,
                self._leader.port,
                request.to_json(),
                secret=self._settings.secret,
                timeout_s=self._settings.join_timeout_s,
            )
        except PermissionError as error:
            raise UserError(f"the leader at {self._leader} does not take our token: {error}") from error
        return JoinOffer.from_json(answer)

    async def _end_or_stop(self, stay: asyncio.Task[bool]) -> None:
        """Wait for the end of the stay. When told to stop, tell the leader, and give it time to take its batches back."""
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({stay, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        session = self._session
        if not stay.done() and session is not None and session.serving:
            logger.info("leader=%s leaving: until it has taken its batches back", self._leader)
            with contextlib.suppress(WorldError, TimeoutError):
                async with asyncio.timeout(_DRAIN_S):
                    await session.leave()
                    await asyncio.wait({stay})
        stay.cancel()
        await asyncio.wait({stay})

    async def _raise_if_stuck(self, session: Session) -> None:
        """The engine may still be busy with a batch of a world that is gone."""
        for _ in range(int(_STUCK_S / 0.05)):
            if not session.place.busy_s:
                return
            await asyncio.sleep(0.05)
        raise StuckError(f"the stage has been computing for {session.place.busy_s:.1f} s and does not come back")

    async def _pause(self, failures: int) -> None:
        """As long as the leader said; else capped, jittered, exponential; none after a stay that served."""
        longest_s = 0.0
        if failures:
            settings = self._settings
            longest_s = min(settings.rejoin_backoff_max_s, settings.rejoin_backoff_s * 2 ** min(failures - 1, 20))
        pause_s, self._wait_s = max(longest_s * random.uniform(0.5, 1.0), self._wait_s), 0.0
        if pause_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stop.wait()
