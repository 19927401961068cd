"""The worker process: ask the leader for a world, serve in it, and come back after every failure."""

import asyncio
import contextlib
import logging
import os
import random
import signal
import threading
from collections.abc import Callable

import torch
import uvloop

from config import UserError, raise_descriptor_limit
from multiworld import AskError, WorldError, WorldManager, ask
from wire import JoinOffer, JoinRequest, WireError
from workers.device import check_device
from workers.engine import Engine
from workers.session import Session
from workers.settings import WorkerSettings

logger = logging.getLogger(__name__)

_STUCK_S = 2.0
"""A stage that still computes so long after its world was broken for hanging will not come back: only a new process helps."""
_DRAIN_S = 30.0
EXIT_STUCK = 70


def run(settings: WorkerSettings) -> int:
    """Serve until told to stop. Gives the exit status: 0 after SIGTERM, Ctrl-C or the parent's end; 70 when the model hangs.

    Raises:
        UserError: the device is not there, or the token is wrong.
    """
    raise_descriptor_limit()
    device = check_device(settings.device)
    torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
    with contextlib.suppress(RuntimeError):  # may be set once a process
        torch.set_num_interop_threads(1)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Worker(settings, device).run())


class Worker:
    """Joins, serves, rejoins. One process, one device, one stage at a time."""

    def __init__(self, settings: WorkerSettings, device: torch.device) -> None:
        self._settings = settings
        self._engine = Engine(device)
        self._stop = asyncio.Event()
        self._session: Session | None = None

    async def run(self) -> int:
        token = self._settings.token.get_secret_value().encode() if self._settings.token else b""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop.set)
        if self._settings.exit_with_parent:
            _watch_parent(lambda: loop.call_soon_threadsafe(self._stop.set))
        async with WorldManager(
            secret=token,
            checked=False,  # as the leader's
            heartbeat_interval_s=self._settings.heartbeat_interval_s,
            heartbeat_timeout_s=self._settings.heartbeat_timeout_s,
        ) as manager:
            status = await self._keep_serving(manager, token)
        self._engine.close()
        return status

    async def _keep_serving(self, manager: WorldManager, token: bytes) -> int:
        failures = 0
        while not self._stop.is_set():
            served = False
            stay = asyncio.create_task(self.stay(manager, token))
            await self._end_or_stop(stay)
            try:
                served = stay.result()
            except asyncio.CancelledError:  # we cancelled it ourselves, to stop
                break
            except (AskError, WorldError, WireError, OSError) as error:
                if failures in (0, 10, 100) or failures % 1000 == 0:
                    logger.warning("leader=%s cannot be joined: %s", self._settings.leader, error)
            if await self._stuck():
                return EXIT_STUCK
            failures = 0 if served else failures + 1
            await self._pause(failures)
        logger.info("stopped")
        return 0

    async def stay(self, manager: WorldManager, token: bytes) -> bool:
        """Join one world and serve in it until it ends. Gives whether it came to serving."""
        host, port = self._settings.leader_host, self._settings.leader_port
        request = JoinRequest(self._settings.name, self._settings.device)
        try:
            answer = await ask(host, port, request.to_json(), secret=token, timeout_s=self._settings.join_timeout_s)
        except PermissionError as error:
            raise UserError(f"the leader at {self._settings.leader} does not take our token: {error}") from error
        offer = JoinOffer.from_json(answer)
        if not offer.world:
            return False
        world = await manager.initialize_world(
            offer.world, 1, 2, addr=host, port=port, epoch=offer.epoch, timeout=self._settings.join_timeout_s
        )
        self._session = Session(world, self._engine)
        try:
            ending = await self._session.run()
            logger.info("world=%s epoch=%d ended cause=%s", world.name, world.epoch, ending.cause)
            return self._session.serving
        finally:
            self._session = None
            await manager.close_world(world.name)

    async def _end_or_stop(self, stay: asyncio.Task[bool]) -> None:
        """Wait for the end of the stay. When told to stop, tell the leader, and give it time to take its batches back."""
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({stay, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        session = self._session
        if not stay.done() and session is not None and session.serving:
            logger.info("leaving: until the leader has taken its batches back")
            with contextlib.suppress(WorldError, TimeoutError):
                async with asyncio.timeout(_DRAIN_S):
                    await session.leave()
                    await asyncio.wait({stay})
        stay.cancel()
        await asyncio.wait({stay})

    async def _stuck(self) -> bool:
        """Whether the engine is still busy with a batch of a world that is gone."""
        for _ in range(int(_STUCK_S / 0.05)):
            if not self._engine.busy_s:
                return False
            await asyncio.sleep(0.05)
        logger.error("the stage has been computing for %.1f s and does not come back: exiting", self._engine.busy_s)
        return True

    async def _pause(self, failures: int) -> None:
        """Capped, jittered, exponential; none after a stay that served."""
        if not failures:
            return
        longest_s = min(
            self._settings.rejoin_backoff_max_s, self._settings.rejoin_backoff_s * 2 ** min(failures - 1, 20)
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(longest_s * random.uniform(0.5, 1.0)):
                await self._stop.wait()


def _watch_parent(on_end: Callable[[], object]) -> None:
    """Call `on_end` when standard input ends: its other end is held by who started us."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):  # not sys.stdin: its lock held by this thread would abort the interpreter's exit
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            on_end()

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
