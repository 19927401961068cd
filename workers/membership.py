"""A worker's tie to one leader: ask it for a world, serve in it, and come back after every failure."""

import _thread
import asyncio
import contextlib
import logging
import mmap
import os
import random
import time

from config import UserError
from config.addresses import Address, parse_address
from multiworld import AskError, JoinError, World, WorldError, WorldManager, ask
from wire import WORLD_BACKEND, JoinOffer, JoinRequest, WireError
from workers.engine import Engine
from workers.last_resort import STUCK_S, end_within
from workers.metrics import WorkerMetrics
from workers.session import Session
from workers.settings import WorkerSettings
from workers.traces import ComputeTraces

logger = logging.getLogger(__name__)

_STUCK_S = 2.0
"""A batch that is still computed so long after its world was broken for hanging will not come back: only a new process helps."""
DRAIN_S = 30.0
"""How long a worker that is told to stop waits for its leaders to take their batches back."""
_FORMING_S = 15.0
"""A leader waits for whom it has offered a world for less."""
_THREAD_S = 10.0
"""A thread that has not run by then never will."""
_ROOM_BYTES = 64 << 20
"""Joining maps less: a few stacks of threads, and what arrives."""


class StuckError(Exception):
    """The stage computes and does not come back, or this process can make no thread any more. Nothing but a new process helps,
    whatever other leaders we have. So this one ends: by itself, or, where even that needs what it lacks, by an alarm of the kernel."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        end_within(STUCK_S)


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
        traces: ComputeTraces | None = None,
    ) -> None:
        self._leader = leader
        self._settings = settings
        self._engine = engine
        self._manager = manager
        self._stop = stop
        self._metrics = metrics
        self._traces = traces
        self._session: Session | None = None
        self._wait_s = 0.0
        """How long the leader has told us to stay away."""

    @property
    def serving(self) -> bool:
        """Whether this leader has a warm stage of us now."""
        return self._session is not None and self._session.serving

    async def keep_serving(self) -> None:
        """Serve this leader until `stop`.

        Raises:
            UserError: the only leader that we have does not take our token.
            StuckError: the stage hangs, or there is no memory for a thread.
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
        await _try_thread()
        offer = await self._ask()
        self._wait_s = offer.wait_ms / 1000
        if not offer.world:
            return False
        world = await self._join(offer)
        self._session = session = Session(world, self._engine, self._stop.set, self._metrics, self._traces)
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

    async def _join(self, offer: JoinOffer) -> World:
        """Form the world that we were offered. Raises WorldError."""
        address = self._leader
        if offer.address:
            try:
                address = parse_address(offer.address)
            except ValueError as error:
                raise WireError(f"JoinOffer: no address: {offer.address!r}") from error
        try:
            return await self._manager.initialize_world(
                *(offer.world, 1, 2, WORLD_BACKEND),
                addr=address.host,
                port=address.port,
                epoch=offer.epoch,
                timeout=min(_FORMING_S, self._settings.join_timeout_s),
            )
        except JoinError as error:
            if address == self._leader:
                raise
            raise JoinError(
                offer.world,
                f"{error.message}; it is the leader that told us to join at {address}: its --advertise-host must be an address "
                f"that this machine reaches",
            ) from error

    async def _ask(self) -> JoinOffer:
        request = JoinRequest(self._settings.name, self._settings.device, self._settings.advertise_host, os.getpid())
        try:
            answer = await ask(
                self._leader.host,
                self._leader.port,
                request.to_json(),
                secret=self._settings.secret,
                timeout_s=self._settings.join_timeout_s,
                bind_host=self._settings.bind_host or "",
            )
        except PermissionError as error:
            refusal = f"the leader at {self._leader} does not take our token: {error}"
            if len(self._settings.leaders) > 1:  # the others do, perhaps, and are not to lose us for it
                raise AskError(refusal) from error
            raise UserError(refusal) from error
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
                async with asyncio.timeout(DRAIN_S):
                    await session.leave()
                    await asyncio.wait({stay})
        stay.cancel()
        await asyncio.wait({stay})

    async def _raise_if_stuck(self, session: Session) -> None:
        """The engine may still be busy for a world that is gone, or have had no memory for it.

        A batch may have broken that world by hanging. Making a stage takes its time, and the world may have ended for any reason.
        """
        if session.out_of_memory:
            raise StuckError("this process has no memory left")
        place, began_s = session.place, time.monotonic()
        while place.busy_s:
            longest_s = self._settings.join_timeout_s if place.loads else _STUCK_S
            if time.monotonic() - began_s > longest_s:
                what = "made" if place.loads else "computing"
                raise StuckError(f"the stage has been {what} for {place.busy_s:.1f} s and does not come back")
            await asyncio.sleep(0.05)

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


async def _try_thread() -> None:
    """See that this process can still make threads, which joining needs, and that there is room for those of joining.

    `threading.Thread.start` waits for ever for one that dies of a lack of memory before it has begun, and with it would the event
    loop. That one thread runs does not say that the next one will: the stack of the last that ended is used again.
    Raises StuckError.
    """
    loop, ran = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(ran.set)

    try:
        mmap.mmap(-1, _ROOM_BYTES).close()
        _thread.start_new_thread(run, ())
        async with asyncio.timeout(_THREAD_S):
            await ran.wait()
    except (OSError, RuntimeError, MemoryError) as error:  # a TimeoutError is an OSError
        raise StuckError("this process has no memory for a thread, and cannot join without") from error
