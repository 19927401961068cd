"""Starts and stops the workers of a running service, as its leaders report what their load needs."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Self

from multiworld_serving.server.supervisor.notify import NotifyListener
from multiworld_serving.server.supervisor.scaling.policy import Grow, ScalingPolicy, Stop
from multiworld_serving.server.supervisor.supervisor import Supervisor

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.25
_REPORT_AGE_S = 5.0
"""A report that is older is ignored. Leaders report twice a second."""


class Autoscaler:
    """Performs what the policy decides inside its `async with` block. Leaving waits until a worker that is being stopped has ended.

    Args:
        workers: their slots. The name of a worker is `name` and the number of its slot.
        notify: receives the reports of the leaders.
    """

    def __init__(
        self, workers: Supervisor, leaders: Supervisor, notify: NotifyListener, name: str, policy: ScalingPolicy
    ) -> None:
        self._workers = workers
        self._leaders = leaders
        self._notify = notify
        self._name = name
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
                self._step()
                problem = ""
            except Exception as error:
                if repr(error) != problem:
                    logger.exception("autoscaling failed, trying again")
                problem = repr(error)
            await asyncio.sleep(_INTERVAL_S)

    def _step(self) -> None:
        pids = [self._leaders.pids.get(slot) for slot in self._leaders.restarts]
        reports = [None if pid is None else self._notify.capacity(pid, _REPORT_AGE_S) for pid in pids]
        slots = {f"{self._name}{slot}": slot for slot in self._workers.restarts}
        running = slots.keys() - self._stopping.keys()
        match self._policy.decide(reports, running, time.monotonic()):
            case Grow(count):
                for _ in range(count - len(running)):
                    self._workers.add()
                logger.info("autoscaling: workers %d -> %d", len(running), count)
            case Stop(worker) if not self._stopping:  # otherwise later, when that one has ended
                logger.info("autoscaling: stopping worker=%s, which the load does not need", worker)
                self._stopping[worker] = asyncio.create_task(self._stop(worker, slots[worker]))

    async def _stop(self, worker: str, slot: int) -> None:
        try:
            await self._workers.remove(slot)
        finally:
            del self._stopping[worker]
