"""Which leader a worker obeys, and what it holds: known to the connections of one worker to all leaders.

The leaders of a group have an order. A worker obeys the first one in it that it is linked to and that can serve what the group serves. If
none can, it obeys the first one. It loads what that leader assigns, and of the other leaders' assignments only what it holds already. So
these can send batches when frontends turn to them.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from multiworld_serving.common.wire.join import MAX_PARTS
from multiworld_serving.workers.stage_loader import AssignedStage

EARLIER_LEADERS_S = 1.0
"""How long a leader is not told what this worker holds because an earlier leader is about to assign it something."""


class LeaderOrder(Collector):
    """Shared by the connections of one worker, which are numbered in the order of the leaders. Used on the event loop only."""

    def __init__(self) -> None:
        self.links: dict[int, LeaderPlace] = {}
        self.attempts: dict[int, asyncio.Event] = {}
        """Attempts to join; set as soon as the leader has assigned a stage."""

    @contextlib.contextmanager
    def attempt(self, number: int) -> Iterator[None]:
        """Covers an attempt to join this leader, and the world that follows."""
        ended = self.attempts[number] = asyncio.Event()
        try:
            yield
        finally:
            ended.set()
            del self.attempts[number]

    @contextlib.contextmanager
    def linked(self, number: int, name: str, world: str = "") -> Iterator["LeaderPlace"]:
        """Covers the time in which this worker is linked to the leader with this name, in this world."""
        place = self.links[number] = LeaderPlace(self, number, name, world)
        try:
            yield place
        finally:
            del self.links[number]

    async def until_earlier_leaders_assigned(self, number: int) -> None:
        """Wait until the leaders before this one have assigned a stage or cannot be joined now; at most `EARLIER_LEADERS_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EARLIER_LEADERS_S):
                for earlier in [event for other, event in self.attempts.items() if other < number]:
                    await earlier.wait()

    def obeyed(self, number: int) -> str:
        """The name of the leader that this worker obeys instead of the one with this number; empty if there is none."""
        first = min({number, *self.links}, key=lambda each: (each in self.links and self.links[each].unable, each))
        return self.links[first].name if first != number else ""

    def collect(self) -> Iterator[Metric]:
        """The metric that shows which leader this worker obeys. See `Collector`."""
        says = "1 for the leader that this worker obeys, 0 for the others that it is connected to."
        obeys = GaugeMetricFamily("multiworld_worker_obeys", says, labels=("leader",))
        for place in self.links.values():
            obeys.add_metric((place.name,), not place.obeyed)
        yield obeys

    @property
    def parts(self) -> str:
        """`parts` of a JoinRequest."""
        return ",".join(sorted(self._assigning.parts)[:MAX_PARTS]) if self._assigning else ""

    @property
    def world(self) -> str:
        """`world` of a JoinRequest."""
        return self._assigning.world if self._assigning else ""

    @property
    def _assigning(self) -> "LeaderPlace | None":
        """The first leader that has assigned stages."""
        return next((place for _, place in sorted(self.links.items()) if place.parts), None)


class LeaderPlace:
    """The place of one linked leader in the order.

    Attributes:
        name: of the leader.
        world: name of the link.
        stages: the stages that this leader has assigned and not unloaded, by version and index.
        unable: whether the leader has said that it cannot serve what the other leaders serve.
        leave: ends the link; set by the session.
    """

    def __init__(self, order: LeaderOrder, number: int, name: str, world: str = "") -> None:
        self.name = name
        self.world = world
        self.stages: dict[tuple[int, int], AssignedStage] = {}
        self.unable = False
        self.leave: Callable[[], object] = lambda: None
        self._order = order
        self._number = number

    @property
    def obeyed(self) -> str:
        """The name of the leader that this worker obeys instead of this one; empty if it obeys this one."""
        return self._order.obeyed(self._number)

    @property
    def parts(self) -> set[str]:
        """The `BundleStageSpec.part`s of the stages that this leader has assigned."""
        return {stage.spec.part for stage in self.stages.values()}

    @property
    def _indexes(self) -> set[int]:
        """The assigned stages, whichever version they have."""
        return {index for _, index in self.stages}

    def accepts(self, digest: str) -> bool:
        """Whether this worker may serve a stage with this digest for this leader."""
        places = self._order.links.values()
        return not self.obeyed or any(digest == stage.digest for place in places for stage in place.stages.values())

    def assigned(self, stage: AssignedStage) -> None:
        """The leader has assigned a stage, which is going to be loaded."""
        self.stages[stage.key] = stage
        if self._number in self._order.attempts:
            self._order.attempts[self._number].set()

    def loaded(self) -> None:
        """A stage is loaded. If this worker obeys the leader, it joins later leaders again that do not know of all its stages."""
        if self._number not in self._order.links or self.obeyed:
            return
        for other, place in self._order.links.items():
            if other > self._number and place.stages and self._indexes - place._indexes:
                place.leave()

    def unloaded(self, version: int) -> None:
        """The leader has unloaded a version."""
        self.stages = {key: stage for key, stage in self.stages.items() if key[0] != version}
