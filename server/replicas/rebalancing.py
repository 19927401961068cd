"""Makes the slowest stage faster when workers differ: exchanges workers between stages, or cuts the model into other stages."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import product
from statistics import median_low

from multiworld_serving.models import ModelError
from multiworld_serving.server.administration import OperationInProgressError, VersionFailedError
from multiworld_serving.server.replicas.exclusive_operation import ExclusiveOperation
from multiworld_serving.server.replicas.placement import CLEARLY_FASTER, Placement, ready_links
from multiworld_serving.server.replicas.registry import COPIES_OF_WEIGHTS, WorkerRegistry
from multiworld_serving.server.replicas.worker_link import WorkerLink
from multiworld_serving.server.versions.cut_bundle import CutBundle

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_GAIN = 1.1
"""A change must make the slowest stage faster by at least this factor."""
_MISSING = 5
"""While replicas are missing, the workers must be unchanged for this many times as long, because most workers return."""


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


@dataclass(frozen=True)
class StageDevices:
    """What the devices of a stage can do together.

    Attributes:
        speed: the sum of the speeds of its ready workers.
        memory_mb: of the worker with the least, in megabytes; infinite if it is unknown.
    """

    speed: float
    memory_mb: float


def stage_devices(placement: Placement) -> list[StageDevices]:
    """The devices of each stage; empty if a stage has no ready worker.

    Speeds that do not clearly differ from the median count as the median, because measurements of equal machines differ. Several leaders
    find the same, because they see the same workers.
    """
    stages = [ready_links(placement.of_stage(stage)) for stage in range(placement.num_stages)]
    if not all(stages):
        return []
    known = placement.speeds()
    measured = {link: known[link.request.host, link.request.device] for links in stages for link in links}
    usual = median_low(filter(None, measured.values())) if any(measured.values()) else 1.0
    clear = {link: speed if speed and _differs(speed, usual) else usual for link, speed in measured.items()}
    return [
        StageDevices(sum(clear[link] for link in links), min(link.request.memory_mb or float("inf") for link in links))
        for links in stages
    ]


def better_cut(current: CutBundle, devices: list[StageDevices]) -> CutBundle | None:
    """Other cuts, with which the slowest stage is at least 10 % faster. None if there are none, or if a stage would not fit into memory."""
    speeds = [stage.speed for stage in devices]
    found = current.for_speeds(speeds)
    if found.slowest_s(speeds) * _GAIN > current.slowest_s(speeds):
        return None
    for index, (stage, former, size) in enumerate(
        zip(devices, current.weights_bytes, found.weights_bytes, strict=True)
    ):
        needed_mb = (former + COPIES_OF_WEIGHTS * size) / 1e6
        if stage.memory_mb < needed_mb:
            logger.info(
                "stage=%d stays as it is: a larger one needs %.0f MB, and a worker has %.0f",
                *(index, needed_mb, stage.memory_mb),
            )
            return None
    return found


def _differs(speed: float, usual: float) -> bool:
    return speed >= CLEARLY_FASTER * usual or usual >= CLEARLY_FASTER * speed


class Rebalancer:
    """Makes one change at a time, each time the workers have not changed for `after_s`: an exchange of two workers, or else other cuts.

    Args:
        recut: switches to these cuts, and returns when all requests use them.
        exclusive: nothing is changed while another operation is in progress.
        after_s: 0 disables it.
        timeout_s: longest wait for a worker to join again.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        recut: Callable[[CutBundle], Awaitable[None]],
        exclusive: ExclusiveOperation,
        *,
        after_s: float,
        timeout_s: float,
    ) -> None:
        self._registry = registry
        self._placement = registry.placement
        self._recut = recut
        self._exclusive = exclusive
        self._after_s = after_s
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start in the background."""
        if self._after_s:
            self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Begin no more changes."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        seen, since_s, decided = self._state(), time.monotonic(), False
        while True:
            await asyncio.sleep(_POLL_S)
            if (state := self._state()) != seen:
                seen, since_s, decided = state, time.monotonic(), False
            elif not decided and time.monotonic() - since_s >= self._needed_s() and not self._exclusive.busy:
                decided = True
                try:
                    if not await self._exchange():
                        await self._cut()
                except Exception:
                    logger.exception("the stages stay as they are until the workers change")

    def _needed_s(self) -> float:
        """How long the workers must be unchanged."""
        return self._after_s * (1 if self._placement.fully_replicated else _MISSING)

    def _state(self) -> list[tuple[str, ...]]:
        links = sorted((link.id, link.state) for link in self._placement.links())
        return [("plan", str(self._registry.plan.number)), *links]

    async def _cut(self) -> None:
        current, devices = self._registry.plan.cut, stage_devices(self._placement)
        if current is None or len(devices) < 2 or not self._placement.settled:
            return
        # Cutting a large graph takes too long for the event loop.
        found = await asyncio.to_thread(better_cut, current, devices)
        if found is None:
            return
        logger.info("the workers of a stage have changed: cutting the model into other stages")
        try:
            await self._recut(found)
        except (ModelError, OSError, OperationInProgressError, VersionFailedError) as error:
            logger.warning("the stages stay as they are: %s", error)

    async def _exchange(self) -> bool:
        """Exchange two workers. Returns False if that would not help."""
        # A spare would take the slot of the worker that moves.
        if not self._placement.fully_replicated or self._placement.spares:
            return False
        exchange = better_exchange(self._placement)
        if exchange is None:
            return False
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
                    break
                self._registry.move(link, stage)
                if not await self._joined(link.worker, stage):
                    logger.warning("worker=%s does not serve stage=%d: the exchange ends", link.worker, stage)
                    break
        finally:
            self._registry.moved()
        return True

    async def _joined(self, worker: str, stage: int) -> bool:
        """Wait until this worker serves this stage. False if it serves another one, or does not join in time."""
        deadline_s = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline_s:
            link = self._placement.live_link_of(worker)
            if link is not None and link.state == "ready":
                return link.slot.stage == stage
            await asyncio.sleep(_POLL_S)
        return False
