"""Exchanges workers between stages, so that the stages with the most work are on the fastest devices."""

import asyncio
import logging
import time
from itertools import product

from multiworld_serving.server.replicas.exclusive_operation import ExclusiveOperation
from multiworld_serving.server.replicas.placement import CLEARLY_FASTER, Placement
from multiworld_serving.server.replicas.registry import WorkerRegistry
from multiworld_serving.server.replicas.worker_link import WorkerLink

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_GAIN = 1.1
"""An exchange must make the slowest stage faster by at least this factor."""


def better_exchange(placement: Placement) -> tuple[WorkerLink, WorkerLink] | None:
    """A worker of the slowest stage, and a faster one of another stage: exchanging them makes both stages faster than that stage was.

    A stage is as fast as the sum of the speeds of its ready workers, divided by its work for a row. Both stages keep a ready replica while
    one of the two workers is away.

    Returns the exchange that gains most, and at least 10 %; among equals the first by names, so that several leaders choose the same one.
    None if there is no such exchange, or if a speed or cost is unknown.
    """
    speeds, costs = placement.speeds(), placement.costs
    stages: list[dict[float, list[WorkerLink]]] = [{} for _ in range(placement.num_stages)]
    for link in sorted(placement.links(), key=lambda link: link.worker):
        if link.state == "ready" and link.slot.stage is not None:
            stages[link.slot.stage].setdefault(speeds[link.request.host, link.request.device], []).append(link)
    if not costs or not all(costs) or any(0.0 in stage or not stage for stage in stages):
        return None
    sums = [sum(speed * len(links) for speed, links in stage.items()) for stage in stages]
    slowest = min(range(len(stages)), key=lambda stage: sums[stage] / costs[stage])
    found, best = None, sums[slowest] / costs[slowest] * _GAIN
    for other in range(len(stages)):
        if any(sum(map(len, stages[each].values())) < 2 for each in (slowest, other)):
            continue
        for slow, fast in product(stages[slowest], stages[other]):
            after = min((sums[slowest] + fast - slow) / costs[slowest], (sums[other] - fast + slow) / costs[other])
            if fast >= CLEARLY_FASTER * slow and after > best:
                found, best = (stages[slowest][slow][0], stages[other][fast][0]), after
    return found


class Rebalancer:
    """Exchanges two workers at a time, each time the workers have not changed for `after_s`.

    Args:
        exclusive: nothing is exchanged while another operation is in progress.
        after_s: 0 disables it.
        timeout_s: longest wait for a worker to join again.
    """

    def __init__(
        self, registry: WorkerRegistry, exclusive: ExclusiveOperation, after_s: float, timeout_s: float
    ) -> None:
        self._registry = registry
        self._placement = registry.placement
        self._exclusive = exclusive
        self._after_s = after_s
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start in the background."""
        if self._after_s:
            self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Begin no more moves."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        seen, since_s, decided = self._state(), time.monotonic(), False
        while True:
            await asyncio.sleep(_POLL_S)
            if (state := self._state()) != seen:
                seen, since_s, decided = state, time.monotonic(), False
            elif not decided and time.monotonic() - since_s >= self._after_s and not self._exclusive.busy:
                decided = True
                # A spare would take the slot of the worker that moves.
                if self._placement.fully_replicated and not self._placement.spares:
                    await self._exchange()

    def _state(self) -> list[tuple[str, str]]:
        return sorted((link.id, link.state) for link in self._placement.links())

    async def _exchange(self) -> None:
        exchange = better_exchange(self._placement)
        if exchange is None:
            return
        slow, fast = exchange
        moves = (fast, slow.stage), (slow, fast.stage)
        logger.info(
            "stage=%d is the slowest: exchanging its worker=%s with worker=%s of stage=%d, which is faster",
            *(slow.stage, slow.worker, fast.worker, fast.stage),
        )
        try:
            for link, stage in moves:
                if link.state != "ready":
                    logger.info("worker=%s has left: the exchange ends", link.worker)
                    return
                self._registry.move(link, stage)
                if not await self._joined(link.worker, stage):
                    logger.warning("worker=%s does not serve stage=%d: the exchange ends", link.worker, stage)
                    return
        finally:
            self._registry.moved()

    async def _joined(self, worker: str, stage: int) -> bool:
        """Wait until this worker serves this stage. False if it serves another one, or does not join in time."""
        deadline_s = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline_s:
            link = self._placement.live_link_of(worker)
            if link is not None and link.state == "ready":
                return link.slot.stage == stage
            await asyncio.sleep(_POLL_S)
        return False
