"""Simulates failures and recoveries of workers over years, without requests: 100,000 failures take about a second.

The history is divided into episodes. An episode begins when a worker fails while all are healthy, and ends when all have been
healthy for `settle_s`. Requests are then simulated only within a sample of the episodes of each kind and in a healthy period;
the history gives the total time of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from random import Random

_MAX_FAILURES = 200
"""Maximum failures of an episode: it would never end if failures are faster than recoveries."""
_ENOUGH_OUTAGES = 200
_SAMPLE_SIZE = 400


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """Worker number `worker` fails `after_s` after the start of the episode, for `down_s`."""

    after_s: float
    worker: int
    down_s: float


@dataclass(frozen=True, slots=True)
class Episode:
    """From the first failure until all workers have been healthy for `settle_s`."""

    failures: tuple[WorkerFailure, ...]
    duration_s: float
    empty_s: float
    """Total time in which some stage had no replica."""


@dataclass(slots=True)
class Episodes:
    """All episodes of one kind: count, total duration and a uniform random sample."""

    count: int = 0
    duration_s: float = 0.0
    sample: list[Episode] = field(default_factory=list)

    def add(self, episode: Episode, random: Random) -> None:
        """Add an episode (reservoir sampling)."""
        self.count += 1
        self.duration_s += episode.duration_s
        if len(self.sample) < _SAMPLE_SIZE:
            self.sample.append(episode)
        elif (place := random.randrange(self.count)) < _SAMPLE_SIZE:
            self.sample[place] = episode


@dataclass(slots=True)
class FleetHistory:
    """Result of a simulation. Worker w serves stage w // replicas."""

    duration_s: float = 0.0
    empty_s: float = 0.0
    failures: int = 0
    degraded: Episodes = field(default_factory=Episodes)
    """Episodes in which every stage kept a replica."""
    outages: Episodes = field(default_factory=Episodes)
    """Episodes in which some stage had none."""

    @property
    def availability(self) -> float:
        """Fraction of time in which every stage had a replica."""
        return 1.0 - self.empty_s / self.duration_s if self.duration_s else 1.0

    @property
    def healthy_s(self) -> float:
        """Total time outside of episodes."""
        return max(0.0, self.duration_s - self.degraded.duration_s - self.outages.duration_s)


def simulate_history(
    *,
    stages: int,
    replicas: int,
    mtbf_s: float,
    recovery_s: float,
    settle_s: float,
    max_failures: int,
    random: Random,
) -> FleetHistory:
    """Simulate until there are enough outages for an estimate, or `max_failures` failures.

    The time from recovery to failure is exponential with mean `mtbf_s`; recovery takes exactly `recovery_s`.
    """
    history = FleetHistory()
    if mtbf_s == float("inf"):
        return history
    for started_s, ends_s, failures in _episodes(stages * replicas, mtbf_s, recovery_s, settle_s, random):
        empty_s = _empty_s(failures, stages, replicas)
        episode = Episode(tuple(failures), ends_s - started_s, empty_s)
        (history.outages if empty_s else history.degraded).add(episode, random)
        history.duration_s = ends_s
        history.empty_s += empty_s
        history.failures += len(failures)
        if history.failures >= max_failures or history.outages.count >= _ENOUGH_OUTAGES:
            break
    return history


def _episodes(
    workers: int, mtbf_s: float, recovery_s: float, settle_s: float, random: Random
) -> Iterator[tuple[float, float, list[WorkerFailure]]]:
    """Yield (start, end, failures) of each episode, for ever. Times of failures are relative to the start."""
    next_failures = [(random.expovariate(1 / mtbf_s), worker) for worker in range(workers)]
    heapify(next_failures)
    while True:
        started_s = ends_s = next_failures[0][0]
        failures: list[WorkerFailure] = []
        while next_failures[0][0] <= ends_s and len(failures) < _MAX_FAILURES:
            failed_s, worker = next_failures[0]
            failures.append(WorkerFailure(failed_s - started_s, worker, recovery_s))
            ends_s = max(ends_s, failed_s + recovery_s + settle_s)
            heapreplace(next_failures, (failed_s + recovery_s + random.expovariate(1 / mtbf_s), worker))
        yield started_s, ends_s, failures


def _empty_s(failures: Sequence[WorkerFailure], stages: int, replicas: int) -> float:
    """Return how long some stage has no replica."""
    if len(failures) < replicas:
        return 0.0
    changes = [(each.after_s, -1, each.worker // replicas) for each in failures]
    changes += [(each.after_s + each.down_s, 1, each.worker // replicas) for each in failures]
    up, empty_s, since_s = [replicas] * stages, 0.0, 0.0
    for time_s, change, stage in sorted(changes):
        if 0 in up:
            empty_s += time_s - since_s
        since_s = time_s
        up[stage] += change
    return empty_s
