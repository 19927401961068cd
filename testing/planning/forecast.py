"""Estimates availability, latency and losses of a fleet by simulation.

    forecast = compute_forecast(Plan(stages=2, replicas=2, load=0.8, mtbf_s=86_400, recovery_s=9, service_s=0.025))
    forecast.p99_s, forecast.failed, forecast.refused

Runs the real scheduler; clients, workers and time are simulated. Failures are rare and requests are frequent, so both are
simulated separately: the fleet alone over years (fleet_history.py), and requests in a sample of its failure episodes and in a
healthy period. Each sample is weighted by the total time of its kind (stratified sampling).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from random import Random
from typing import get_args

from multiworld_serving.server.scheduling.scheduler import SchedulerConfig
from multiworld_serving.testing.planning.fleet_history import Episode, Episodes, FleetHistory, simulate_history
from multiworld_serving.testing.planning.meter import Meter, quantile
from multiworld_serving.testing.simulation.scenarios import Scenario, Tail
from multiworld_serving.testing.simulation.simulator import Simulator
from multiworld_serving.testing.simulation.workload import Arrival, FaultInjected, Injection, Recording, Start

_HISTORY_FAILURES = 200_000
_FEWEST_EPISODES = 3
_BUSY = 0.9
_MAX_REQUESTS = 1_000_000
_ALL_REASONS = frozenset({"overloaded", "deadline", "no_replica", "poison", "stage_error"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Parameters of the service, its load and its failures.

    Raises:
        ValueError: a value is out of range.
    """

    stages: int
    replicas: int
    """Replicas per stage."""
    load: float
    """Arrival rate as a fraction of the capacity with full batches."""
    mtbf_s: float = 86_400.0
    """Mean time between failures of one worker; infinity for none."""
    recovery_s: float = 9.0
    """Time from the death of a worker until it serves again."""
    detection_s: float = 0.005
    """Time from the death of a worker until the leader detects it."""
    service_s: float = 0.025
    """Compute time of one row in one stage."""
    row_share: float = 0.25
    """Cost of each further row of a batch, as a fraction of the first."""
    tail: Tail = "none"
    deadline_s: float = 30.0
    max_batch_size: int = 8
    batch_timeout_s: float = 0.002
    window: int = 2
    queue_limit: int = 256
    grace_s: float = 15.0
    """How long requests wait for a stage without a replica."""
    requests: int = 20_000
    """Approximate number of simulated requests."""
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
        """Requests per second that all replicas of a stage can compute."""
        return self.replicas * self.max_batch_size / (self.service_s * (1 + self.row_share * (self.max_batch_size - 1)))

    @property
    def rate(self) -> float:
        """Arrival rate in requests per second."""
        return self.load * self.capacity

    @property
    def exact_availability(self) -> float:
        """Closed form: fraction of time in which every stage has a replica, if workers fail independently."""
        down = 0.0 if self.mtbf_s == float("inf") else self.recovery_s / (self.mtbf_s + self.recovery_s)
        return float((1.0 - down**self.replicas) ** self.stages)

    @property
    def settle_s(self) -> float:
        """Time after the last recovery until a backlog is worked off."""
        return 20 * self.stages * self.service_s + self._backlog_s

    @property
    def warm_up_s(self) -> float:
        """Warm-up time after which the initially empty queue has no effect."""
        return 50 * self.stages * self.service_s + (self._backlog_s if self.load > _BUSY else 0.0)

    @property
    def _backlog_s(self) -> float:
        """Time to drain a full queue, or to fill it under overload."""
        return min(self.deadline_s, self.queue_limit / max(abs(self.capacity - self.rate), 1e-9))

    def _require(self, satisfied: bool, name: str, expected: str) -> None:
        if not satisfied:
            raise ValueError(f"{name} is {getattr(self, name)!r}, expected {expected}")


@dataclass(frozen=True, slots=True)
class Forecast:
    """Result of a simulation. Fractions are of all requests."""

    plan: Plan
    availability: float
    """Simulated fraction of time in which every stage has a replica."""
    answered: float
    refused: dict[str, float]
    """Fraction of refused requests by reason."""
    mean_s: float | None
    """Mean latency from arrival to answer; None if no request was answered."""
    p50_s: float | None
    p99_s: float | None
    requests: int
    """Number of simulated requests."""
    failures: int
    """Number of worker failures in the simulated history."""
    outages: int
    """Number of episodes in which some stage had no replica."""

    @property
    def failed(self) -> float:
        """Fraction of requests that were not answered."""
        return 1.0 - self.answered


@dataclass(slots=True)
class _WeightedResults:
    """Weighted results of the simulated periods."""

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


def compute_forecast(plan: Plan) -> Forecast:
    """Simulate a plan. The same plan gives the same forecast.

    Raises:
        ValueError: too many requests would have to be simulated per failure.
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
    results = _WeightedResults()
    healthy_s = history.healthy_s if history.failures else 1.0
    if healthy_s:
        duration_s = plan.requests / 2 / plan.rate
        results.add([_simulate(plan, Episode((), duration_s, 0.0), random)], healthy_s / duration_s)
    for kind in (history.degraded, history.outages):
        if kind.count:
            episodes = _sample_episodes(plan, kind, random)
            weight = kind.duration_s / sum(episode.duration_s for episode in episodes)
            results.add([_simulate(plan, episode, random) for episode in episodes], weight)
    return _forecast(plan, history, results)


def _sample_episodes(plan: Plan, kind: Episodes, random: Random) -> list[Episode]:
    """Return a sample of episodes that uses about a quarter of the requests."""
    each = plan.rate * kind.duration_s / kind.count
    if each > _MAX_REQUESTS:
        raise ValueError(
            f"{each:.0f} requests would have to be simulated per failure (at most {_MAX_REQUESTS:,}): reduce the load or the recovery time"
        )
    wanted = max(_FEWEST_EPISODES, int(plan.requests / 4 / each))
    return random.sample(kind.sample, min(wanted, len(kind.sample)))


def _simulate(plan: Plan, episode: Episode, random: Random) -> Meter:
    """Simulate one episode after a warm-up that is not counted."""
    warm_up_s = plan.warm_up_s
    until_s = warm_up_s + episode.duration_s
    meter = Meter(warm_up_s, until_s)
    injections = sorted(_injections(plan, episode, warm_up_s, random), key=lambda each: each.at_s)
    simulator = Simulator(_scenario(plan), random.getrandbits(32), observe=lambda _: meter)
    simulator.play(Recording(tuple(injections), until_s))
    return meter


def _injections(plan: Plan, episode: Episode, warm_up_s: float, random: Random) -> Iterator[Injection]:
    for number in range(plan.stages * plan.replicas):
        yield Start(0.0, str(number), number // plan.replicas)
    for failing in episode.failures:
        yield FaultInjected(warm_up_s + failing.after_s, "kill", str(failing.worker), down_s=failing.down_s)
    at_s, request = random.expovariate(plan.rate), 0
    while at_s < warm_up_s + episode.duration_s:
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
        allowed_refusals=_ALL_REASONS,
    )


def _forecast(plan: Plan, history: FleetHistory, results: _WeightedResults) -> Forecast:
    answered = sum(weight for _, weight in results.latencies)
    total = answered + results.refused.total()
    mean_s = sum(latency_s * weight for latency_s, weight in results.latencies) / answered if answered else None
    return Forecast(
        plan=plan,
        availability=history.availability,
        answered=answered / total,
        refused={reason: share / total for reason, share in sorted(results.refused.items())},
        mean_s=mean_s,
        p50_s=quantile(results.latencies, 0.50),
        p99_s=quantile(results.latencies, 0.99),
        requests=results.requests,
        failures=history.failures,
        outages=history.outages.count,
    )
