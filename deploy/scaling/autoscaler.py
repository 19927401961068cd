"""Starts and stops the workers of a running service, as its leaders report what their load needs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol, Self

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.deploy.scaling.policy import Grow, Limits, ScalingPolicy, Stop
from multiworld_serving.server.capacity_report import CapacityReport
from multiworld_serving.server.settings import ServeSettings

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.25
REPORT_AGE_S = 5.0
"""A report that is older is ignored. Leaders report twice a second."""


class Launcher(Protocol):
    """What starts and stops the workers: see `processes/group.py`."""

    async def capacity_reports(self) -> Sequence[CapacityReport | None]:
        """The last report of each leader, None if it is older than `REPORT_AGE_S`."""

    async def workers(self) -> set[str]:
        """Names of the workers that run, are starting, will be restarted or are being stopped."""

    async def scale_workers(self, count: int) -> None:
        """Start workers until there are `count`. Stops none: if there are more, the caller chooses which to stop.

        Returns when they are started; they join their leaders later. Raises UserError if the resources do not suffice; workers for which
        they do are started.
        """

    async def stop_worker(self, name: str) -> None:
        """Stop a worker for good: SIGTERM, after which it returns its batches, and SIGKILL after the stop timeout.

        Returns when it has ended. Its name may be used again. Raises KeyError if there is no such worker.
        """


def limits_of(settings: ServeSettings) -> Limits | None:
    """The limits of `--autoscale`; None without it."""
    if settings.worker_limits is None:
        return None
    least, most = settings.worker_limits
    return Limits(least, most, settings.replicas, settings.spares)


class Autoscaler:
    """Performs what the policy decides inside its `async with` block. Leaving waits until a worker that is being stopped has ended."""

    def __init__(self, launcher: Launcher, policy: ScalingPolicy) -> None:
        self._launcher = launcher
        self._policy = policy
        self._stopping: dict[str, asyncio.Task[None]] = {}
        """The worker that is being stopped, if there is one: the next one is chosen when it has ended."""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, *self._stopping.values(), return_exceptions=True)

    async def _run(self) -> None:
        """Decide and act regularly. A failure changes no workers, and is logged once until it changes."""
        problem = ""
        while True:
            try:
                await self._step()
                problem = ""
            except Exception as error:
                if repr(error) != problem:
                    unexpected = not isinstance(error, UserError)
                    logger.warning("autoscaling failed, trying again: %s", error, exc_info=unexpected)
                problem = repr(error)
            await asyncio.sleep(_INTERVAL_S)

    async def _step(self) -> None:
        reports = await self._launcher.capacity_reports()
        workers = await self._launcher.workers()
        running = workers - self._stopping.keys()
        match self._policy.decide(reports, running, time.monotonic()):
            case Grow(count):
                await self._launcher.scale_workers(count + len(workers) - len(running))
                logger.info("autoscaling: workers %d -> %d", len(running), count)
            case Stop(worker) if not self._stopping:  # otherwise later, when that one has ended
                logger.info("autoscaling: stopping worker=%s, which the load does not need", worker)
                self._stopping[worker] = asyncio.create_task(self._stop(worker))

    async def _stop(self, worker: str) -> None:
        try:
            await self._launcher.stop_worker(worker)
        except KeyError:
            logger.info("autoscaling: worker=%s has ended by itself", worker)
        finally:
            del self._stopping[worker]
