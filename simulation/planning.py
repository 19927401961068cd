"""What a fleet would be worth: availability, latency and losses, before the machines are bought.

    forecast = foresee(Plan(stages=2, replicas=2, load=0.8, mtbf_s=86_400, recovery_s=9, service_s=0.025))
    forecast.p99_s, forecast.failed, forecast.refused

The real scheduler decides; clients, workers and time are simulated. Failures are rare and requests are many, so the two
are simulated apart: the fleet alone over years (fleet_history.py), and requests within some of the episodes of trouble
found there and in a stretch of quiet. Each counts by the time that there is of its kind (stratified sampling).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from random import Random
from typing import get_args

from server.scheduler import SchedulerConfig
from simulation.fleet_history import Episode, Episodes, FleetHistory, simulate_history
from simulation.injections import Arrival, Injection, Recording, Start, Strike
from simulation.meter import Meter, quantile
from simulation.scenario import Scenario, Tail
from simulation.simulator import Simulator

_HISTORY_FAILURES = 200_000
_FEWEST_EPISODES = 3
_BUSY = 0.9
_MOST_REQUESTS = 1_000_000
_ALL_REASONS = frozenset({"overloaded", "deadline", "no_replica", "poison", "stage_error"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A service, its load and its luck.

    Raises:
        ValueError: a number is out of its range.
    """

    stages: int
    replicas: int
    """Of each stage."""
    load: float
    """Requests that come, as a share of what all replicas together could compute in full batches."""
    mtbf_s: float = 86_400.0
    """Mean time between failures of one worker; infinity for none."""
    recovery_s: float = 9.0
    """From the death of a worker until it serves again."""
    detection_s: float = 0.005
    """From the death of a worker until the leader knows."""
    service_s: float = 0.025
    """Time of one row in one stage."""
    row_share: float = 0.25
    """What every further row of a batch costs, as a share of the first."""
    tail: Tail = "none"
    deadline_s: float = 30.0
    max_batch_size: int = 8
    batch_timeout_s: float = 0.002
    window: int = 2
    queue_limit: int = 256
    grace_s: float = 15.0
    """How long work waits for a stage without a replica."""
    requests: int = 20_000
    """How many to simulate, about: more is more exact."""
    seed: int = 1

    def __post_init__(self) -> None:
        for name in ("stages", "replicas", "max_batch_size", "window", "queue_limit", "requests"):
            self._require(getattr(self, name) >= 1, name, "at least 1")
        for name in ("load", "mtbf_s", "recovery_s", "service_s", "deadline_s"):
            self._require(getattr(self, name) > 0, name, "more than 0")
        for name in ("detection_s", "row_share", "batch_timeout_s", "grace_s"):
            self._require(getattr(self, name) >= 0, name, "at least 0")
        for name in ("load", "recovery_s", "detection_s", "service_s", "row_share", "deadline_s", "grace_s"):
            self._require(isfinite(getattr(self, name)), name, "finite")
        self._require(self.tail in get_args(Tail), "tail", " or ".join(get_args(Tail)))
        self._require(self.detection_s <= self.recovery_s, "detection_s", "at most recovery_s")

    @property
    def capacity(self) -> float:
        """Requests per second that all replicas of a stage together can compute."""
        return self.replicas * self.max_batch_size / (self.service_s * (1 + self.row_share * (self.max_batch_size - 1)))

    @property
    def rate(self) -> float:
        """Requests per second that come."""
        return self.load * self.capacity

    @property
    def exact_availability(self) -> float:
        """In closed form: the share of time in which every stage has a replica, if workers fail independently."""
        down = 0.0 if self.mtbf_s == float("inf") else self.recovery_s / (self.mtbf_s + self.recovery_s)
        return float((1.0 - down**self.replicas) ** self.stages)

    @property
    def settle_s(self) -> float:
        """For so long after the last recovery a backlog may still be felt."""
        return 20 * self.stages * self.service_s + self._backlog_s

    @property
    def warm_s(self) -> float:
        """After so long it no longer matters that the queue was empty at first."""
        return 50 * self.stages * self.service_s + (self._backlog_s if self.load > _BUSY else 0.0)

    @property
    def _backlog_s(self) -> float:
        """How long it takes to work off a full queue; to fill it, if more comes than can be computed."""
        return min(self.deadline_s, self.queue_limit / max(abs(self.capacity - self.rate), 1e-9))

    def _require(self, satisfied: bool, name: str, expected: str) -> None:
        if not satisfied:
            raise ValueError(f"{name} is {getattr(self, name)!r}, it must be {expected}")


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a plan comes to. Shares are of all requests."""

    plan: Plan
    availability: float
    """Share of time in which every stage has a replica, as simulated."""
    answered: float
    refused: dict[str, float]
    """By reason."""
    mean_s: float | None
    """Latency, from arrival to answer; None if nothing was answered."""
    p50_s: float | None
    p99_s: float | None
    requests: int
    """Simulated."""
    failures: int
    """Of workers, in the simulated history."""
    outages: int
    """Episodes in it in which some stage had no replica."""

    @property
    def failed(self) -> float:
        """Not answered, for whatever reason."""
        return 1.0 - self.answered


@dataclass(slots=True)
class _Tally:
    """Requests of several kinds of time, each with its weight."""

    latencies: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, weight)"""
    refused: Counter[str] = field(default_factory=Counter)
    requests: int = 0

    def add(self, meters: list[Meter], weight: float) -> None:
        for meter in meters:
            self.requests += len(meter.latencies_s) + meter.refused.total()
            self.latencies += [(latency_s, weight) for latency_s in meter.latencies_s]
            for reason, count in meter.refused.items():
                self.refused[reason] += count * weight  # type: ignore[assignment]


def foresee(plan: Plan) -> Forecast:
    """Simulate it. The same plan gives the same forecast.

    Raises:
        ValueError: so many requests come during one failure that it would take hours.
    """
    random = Random(f"planning/{plan.seed}")
    history = simulate_history(
        stages=plan.stages,
        replicas=plan.replicas,
        mtbf_s=plan.mtbf_s,
        recovery_s=plan.recovery_s,
        settle_s=plan.settle_s,
        max_failures=_HISTORY_FAILURES,
        random=random,
    )
    tally = _Tally()
    quiet_s = history.quiet_s if history.failures else 1.0
    if quiet_s:
        lasts_s = plan.requests / 2 / plan.rate
        tally.add([_simulate(plan, Episode((), lasts_s, 0.0), random)], quiet_s / lasts_s)
    for kind in (history.degraded, history.outages):
        if kind.count:
            episodes = _chosen(plan, kind, random)
            weight = kind.lasts_s / sum(episode.lasts_s for episode in episodes)
            tally.add([_simulate(plan, episode, random) for episode in episodes], weight)
    return _forecast(plan, history, tally)


def _chosen(plan: Plan, kind: Episodes, random: Random) -> list[Episode]:
    """As many as a quarter of the requests will do for."""
    each = plan.rate * kind.lasts_s / kind.count
    if each > _MOST_REQUESTS:
        raise ValueError(f"{each:.0f} requests come while one failure is felt: ask for less load or a shorter recovery")
    wanted = max(_FEWEST_EPISODES, int(plan.requests / 4 / each))
    return random.sample(kind.sample, min(wanted, len(kind.sample)))


def _simulate(plan: Plan, episode: Episode, random: Random) -> Meter:
    """One episode, after a while of quiet that does not count."""
    warm_s = plan.warm_s
    until_s = warm_s + episode.lasts_s
    meter = Meter(warm_s, until_s)
    injections = sorted(_injections(plan, episode, warm_s, random), key=lambda each: each.at_s)
    simulator = Simulator(_scenario(plan), random.getrandbits(32), observe=lambda _: meter)
    simulator.play(Recording(tuple(injections), until_s))
    return meter


def _injections(plan: Plan, episode: Episode, warm_s: float, random: Random) -> Iterator[Injection]:
    for number in range(plan.stages * plan.replicas):
        yield Start(0.0, str(number), number // plan.replicas)
    for failing in episode.failures:
        yield Strike(warm_s + failing.after_s, "kill", str(failing.worker), down_s=failing.down_s)
    at_s, request = random.expovariate(plan.rate), 0
    while at_s < warm_s + episode.lasts_s:
        request += 1
        yield Arrival(at_s, request, plan.deadline_s)
        at_s += random.expovariate(plan.rate)


def _scenario(plan: Plan) -> Scenario:
    config = SchedulerConfig(
        num_stages=plan.stages,
        max_batch_size=plan.max_batch_size,
        batch_timeout_s=plan.batch_timeout_s,
        window=plan.window,
        queue_limit=plan.queue_limit,
        recovery_grace_s=plan.grace_s,
    )
    return Scenario(
        name="plan",
        config=config,
        replicas=plan.replicas,
        work_s=plan.service_s,
        row_share=plan.row_share,
        tail=plan.tail,
        network_s=0.0,
        detection_s=plan.detection_s,
        recovery_s=plan.recovery_s,
        recovery_varies=False,
        permits=_ALL_REASONS,
    )


def _forecast(plan: Plan, history: FleetHistory, tally: _Tally) -> Forecast:
    answered = sum(weight for _, weight in tally.latencies)
    total = answered + tally.refused.total()
    mean_s = sum(latency_s * weight for latency_s, weight in tally.latencies) / answered if answered else None
    return Forecast(
        plan=plan,
        availability=history.availability,
        answered=answered / total,
        refused={reason: share / total for reason, share in sorted(tally.refused.items())},
        mean_s=mean_s,
        p50_s=quantile(tally.latencies, 0.50),
        p99_s=quantile(tally.latencies, 0.99),
        requests=tally.requests,
        failures=history.failures,
        outages=history.outages.count,
    )
