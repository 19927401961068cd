"""Starts and stops the workers of a running service, as its leaders report what their load needs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from multiworld_serving.common.config import UserError
from multiworld_serving.deploy.processes.launcher import Launcher
from multiworld_serving.deploy.scaling.policy import Grow, Limits, ScalingPolicy, Stop
from multiworld_serving.server.capacity_report import CapacityReport
from multiworld_serving.server.settings import ServeSettings

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.25
REPORT_AGE_S = 5.0
"""A report that is older is ignored. Leaders report twice a second."""

Reports = Callable[[], Awaitable[Sequence[CapacityReport | None]]]
"""The last report of each leader, None if it is older than `REPORT_AGE_S`."""


def limits_of(settings: ServeSettings) -> Limits | None:
    """The limits of `--autoscale`; None without it."""
    if settings.worker_limits is None:
        return None
    least, most = settings.worker_limits
    return Limits(least, most, settings.replicas, settings.spares)


class Autoscaler:
    """Performs what the policy decides inside its `async with` block. Leaving waits until a worker that is being stopped has ended."""

    def __init__(self, launcher: Launcher, reports: Reports, policy: ScalingPolicy) -> None:
        self._launcher = launcher
        self._reports = reports
        self._policy = policy
        self._stopping: dict[str, asyncio.Task[None]] = {}
        """The worker that is being stopped, if there is one: the next one is chosen when it has ended."""
        self._refused = self._failed = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, *self._stopping.values(), return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._step()
                self._failed = False
            except Exception:
                if not self._failed:
                    logger.exception("autoscaling failed; the workers stay as they are until it succeeds")
                self._failed = True
            await asyncio.sleep(_INTERVAL_S)

    async def _step(self) -> None:
        reports = await self._reports()
        workers = {process.name for process in await self._launcher.processes() if process.role == "worker"}
        match self._policy.decide(reports, workers - self._stopping.keys(), time.monotonic()):
            case Grow(count):
                await self._grow(count, len(workers - self._stopping.keys()), len(workers & self._stopping.keys()))
            case Stop(worker) if not self._stopping:  # otherwise later, when that one has ended
                logger.info("autoscaling: stopping worker=%s, which the load does not need", worker)
                self._stopping[worker] = asyncio.create_task(self._stop(worker))

    async def _grow(self, count: int, running: int, stopping: int) -> None:
        """Start workers until `count` run, not counting those that are being stopped. Log a refusal once, until a start succeeds."""
        if not self._refused:
            logger.info("autoscaling: workers %d -> %d", running, count)
        try:
            await self._launcher.scale_workers(count + stopping)
            self._refused = False
        except UserError as error:
            if not self._refused:
                logger.warning("autoscaling: no more workers can be started: %s", error)
            self._refused = True

    async def _stop(self, worker: str) -> None:
        try:
            await self._launcher.stop_worker(worker)
        except KeyError:
            logger.info("autoscaling: worker=%s has ended by itself", worker)
        finally:
            del self._stopping[worker]
