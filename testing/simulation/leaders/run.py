"""Scenarios of failing leaders, and what must hold for every request whatever happens.

- It has one result, its own, at the latest `_DEADLINE_GRACE_S` after its deadline.
- It is submitted at most once more than leaders were lost with it, plus once after a rejection, and then to another leader.
- It is rejected as poison exactly when two leaders were lost with it, and not sent again.
- It is answered, if faults hit one leader at a time and another one serves.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import torch

from multiworld_serving.server.errors import RequestRejected
from multiworld_serving.server.frontends.leader_pool import LeaderPool
from multiworld_serving.server.observability.metrics import Metrics
from multiworld_serving.server.predictor import ImageSizes, ServedModel
from multiworld_serving.server.scheduling.scheduler import SchedulerConfig
from multiworld_serving.testing.simulation.leaders.cluster import HEARTBEAT_TIMEOUT_S, Cluster, SimulatedLink, Trail
from multiworld_serving.testing.simulation.leaders.virtual_time import run_virtual

_MODEL = ServedModel.image_classifier("m", "v1", ("request",), ImageSizes(1, 1))
_GRACE_S = 5.0
_LATE_S = 0.51
"""After the deadline: the extra time of the frontend, and rounding."""
_SETTLE_S = 2.0
_ELSEWHERE = ("overloaded", "no_replica", "not_ready")


@dataclass(frozen=True)
class LeaderScenario:
    """Load and faults of one run.

    Attributes:
        faults: rate of each fault per second: kill, freeze, pause (shorter than the heartbeat timeout), cut, worker.
        one_at_a_time: wait after each fault until all leaders serve; every healthy request must be answered.
        poison: share of requests that kill their leader.
        refusals: results that a healthy request may have besides an answer.
    """

    name: str
    leaders: int = 2
    frontends: int = 2
    replicas: int = 2
    rate: float = 60.0
    timeouts_s: tuple[float, float] = (10.0, 30.0)
    faults: dict[str, float] = field(default_factory=dict)
    one_at_a_time: bool = False
    poison: float = 0.0
    queue_limit: int = 256
    refusals: frozenset[str] = frozenset()


_ALL_FAULTS = {"kill": 0.2, "freeze": 0.2, "pause": 0.2, "cut": 0.2, "worker": 0.2}
_LOSSES = frozenset({"deadline", "not_ready", "no_replica", "poison", "overloaded"})
SCENARIOS = (
    LeaderScenario("one-leader-at-a-time", faults=_ALL_FAULTS, one_at_a_time=True),
    LeaderScenario("one-of-three-leaders-at-a-time", leaders=3, frontends=3, faults=_ALL_FAULTS, one_at_a_time=True),
    LeaderScenario("single-leader-restarts", leaders=1, frontends=1, faults={"kill": 0.2}, one_at_a_time=True),
    LeaderScenario("leaders-fail-together", faults={name: 3 * rate for name, rate in _ALL_FAULTS.items()}, refusals=_LOSSES),
    LeaderScenario("short-deadlines", faults=_ALL_FAULTS, timeouts_s=(0.02, 2.0), refusals=_LOSSES),
    LeaderScenario("overload", faults={"kill": 0.1}, rate=300.0, replicas=1, queue_limit=20, timeouts_s=(0.5, 5.0), refusals=_LOSSES),
    LeaderScenario("poison", leaders=3, poison=0.005, refusals=_LOSSES),
    LeaderScenario("everything", leaders=3, frontends=3, faults=_ALL_FAULTS, poison=0.002, rate=150.0, queue_limit=50, refusals=_LOSSES),
)  # fmt: skip


@dataclass
class LeaderRun:
    """One run of a scenario. The same seed gives the same run.

    Attributes:
        outcomes: result of each request: "answered", or the reason of the rejection.
        trails: the submissions of each request.
    """

    scenario: LeaderScenario
    seed: int
    outcomes: dict[int, str] = field(default_factory=dict)
    trails: dict[int, Trail] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    late_answers: int = 0

    def run(self, seconds: float) -> None:
        """Simulate the load for so long, then wait for the last results. Raises AssertionError with the command that replays it."""
        try:
            run_virtual(self._run(seconds))
        except Exception as error:
            error.add_note(self.command(seconds))
            raise

    def command(self, seconds: float) -> str:
        """The command that runs it again, from the root of the repository."""
        return (
            f"replay: python -m multiworld_serving.testing.simulation.leaders "
            f"--scenario {self.scenario.name} --seed {self.seed} --seconds {seconds:g}"
        )

    async def _run(self, seconds: float) -> None:
        scenario, loop = self.scenario, asyncio.get_running_loop()
        config = SchedulerConfig(num_stages=2, recovery_grace_s=_GRACE_S, queue_limit=scenario.queue_limit)
        seed = f"{scenario.name}/{self.seed}"
        cluster = Cluster(seed, leaders=scenario.leaders, replicas=scenario.replicas, config=config)
        pools = []
        for _ in range(scenario.frontends):
            pool = LeaderPool(_GRACE_S, Metrics(), lambda _snapshot: None, loop.time)
            pool.model.set_result(_MODEL)
            pool.links.extend(SimulatedLink(leader, pool, self.trails) for leader in cluster.leaders)
            pools.append(pool)
        await self._wait_until_ready(pools)
        ends_s, random = loop.time() + seconds, Random(f"{seed}/load")
        async with asyncio.TaskGroup() as tasks:
            faults = tasks.create_task(self._inject(cluster, pools))
            number = 0
            while loop.time() < ends_s:
                await asyncio.sleep(random.expovariate(scenario.rate))
                number += 1
                if random.random() < scenario.poison:
                    cluster.poison.add(number)
                timeout_s = random.uniform(*scenario.timeouts_s)
                tasks.create_task(self._request(cluster, random.choice(pools), number, timeout_s))
            faults.cancel()
        assert len(self.outcomes) == number, "a request has no result"
        self.late_answers = cluster.late_answers

    async def _wait_until_ready(self, pools: list[LeaderPool]) -> None:
        while not all(link.state is not None and link.state.ready for pool in pools for link in pool.links):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.05)

    async def _inject(self, cluster: Cluster, pools: list[LeaderPool]) -> None:
        names, rates = list(self.scenario.faults), list(self.scenario.faults.values())
        random = Random(f"{self.scenario.name}/{self.seed}/faults")
        while names:
            await asyncio.sleep(random.expovariate(sum(rates)))
            fault, leader = random.choices(names, rates)[0], random.choice(cluster.leaders)
            self.faults[fault] += 1
            if fault == "kill":
                leader.kill()
            elif fault == "worker":
                random.choice(cluster.workers).kill()
            else:
                times_s = (0.1, 0.9) if fault == "pause" else (1.1, 4.0)
                lasts_s = HEARTBEAT_TIMEOUT_S * random.uniform(*times_s)
                (leader.cut if fault == "cut" else leader.freeze)(lasts_s)
            if self.scenario.one_at_a_time:
                await asyncio.sleep(4 * HEARTBEAT_TIMEOUT_S)
                await self._wait_until_ready(pools)
                await asyncio.sleep(_SETTLE_S)

    async def _request(self, cluster: Cluster, pool: LeaderPool, number: int, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        deadline_s = began_s + timeout_s
        outcome, own = "answered", True
        try:
            image = torch.zeros(3, 1, 1, dtype=torch.uint8)
            found = await pool.predict(image, deadline_s=deadline_s, request_id=str(number))
            own = found.output.tolist() == [float(number)]
        except RequestRejected as rejection:
            outcome = rejection.reason
        trail = self.trails.get(number, [])
        described = (
            f"request {number}, {timeout_s:.3f} s: {outcome} after {loop.time() - began_s:.3f} s, submissions {trail}"
        )
        assert number not in self.outcomes, f"two results: {described}"
        self.outcomes[number] = outcome
        assert own, f"answer of another request: {described}"
        assert loop.time() <= deadline_s + _LATE_S, f"after the deadline: {described}"
        _check_trail(outcome, trail, described)
        if number in cluster.poison:
            assert outcome != "answered", f"a poisonous request was answered: {described}"
        else:
            assert outcome in {"answered"} | self.scenario.refusals, f"a healthy request was refused: {described}"


def _check_trail(outcome: str, trail: Trail, described: str) -> None:
    results = [result for _, result in trail]
    lost = results.count("lost")
    assert lost <= 2, f"sent again after two leaders were lost with it: {described}"
    assert (outcome == "poison") == (lost == 2), f"poison without two lost leaders, or the reverse: {described}"
    assert len(trail) <= 1 + lost + results.count("left") + 1, f"sent too often: {described}"
    assert results.count("answered") == (outcome == "answered"), f"not the answer of a leader: {described}"
    rejecting = [leader for leader, result in trail if result in _ELSEWHERE]
    assert len(rejecting) <= 2, f"tried elsewhere more than once: {described}"
    assert len(set(rejecting)) == len(rejecting), f"sent again to the leader that rejected it: {described}"
