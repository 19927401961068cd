"""Which workers are down when, over years: no requests, so a hundred thousand failures take a second.

The history is cut into episodes. One begins when a worker fails while all are well, and ends when all have been well for
`settle_s`. What happens to requests needs to be simulated only within a few episodes of each kind, and in a stretch of
quiet; the history says how much time there is of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from random import Random

_MOST_FAILURES = 200
"""An episode is cut off after so many: where failures come faster than they heal there would be no end."""
_ENOUGH_OUTAGES = 200
_KEPT = 400


@dataclass(frozen=True, slots=True)
class Failing:
    """A worker, by number, goes down `after_s` into the episode, for `down_s`."""

    after_s: float
    worker: int
    down_s: float


@dataclass(frozen=True, slots=True)
class Episode:
    """From the first failure until all have been well for a while."""

    failures: tuple[Failing, ...]
    lasts_s: float
    empty_s: float
    """For so long some stage had no replica."""


@dataclass(slots=True)
class Episodes:
    """All episodes of one kind: how many, how long together, and some of them as a fair sample."""

    count: int = 0
    lasts_s: float = 0.0
    sample: list[Episode] = field(default_factory=list)

    def add(self, episode: Episode, random: Random) -> None:
        """One more."""
        self.count += 1
        self.lasts_s += episode.lasts_s
        if len(self.sample) < _KEPT:
            self.sample.append(episode)
        elif (place := random.randrange(self.count)) < _KEPT:
            self.sample[place] = episode


@dataclass(slots=True)
class FleetHistory:
    """Workers are numbered stage by stage: worker w serves stage w // replicas."""

    lasts_s: float = 0.0
    empty_s: float = 0.0
    failures: int = 0
    degraded: Episodes = field(default_factory=Episodes)
    """Episodes in which every stage kept a replica."""
    outages: Episodes = field(default_factory=Episodes)
    """Episodes in which some stage had none."""

    @property
    def availability(self) -> float:
        """The share of time in which every stage had a replica."""
        return 1.0 - self.empty_s / self.lasts_s if self.lasts_s else 1.0

    @property
    def quiet_s(self) -> float:
        """Time outside of all episodes."""
        return max(0.0, self.lasts_s - self.degraded.lasts_s - self.outages.lasts_s)


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
    """Until a stage has been lost often enough to tell, or `max_failures` are over.

    Every worker fails at random, `mtbf_s` after it last recovered on the mean (exponential), and is back after
    `recovery_s` exactly.
    """
    history = FleetHistory()
    if mtbf_s == float("inf"):
        return history
    for started_s, ends_s, failures in _episodes(stages * replicas, mtbf_s, recovery_s, settle_s, random):
        empty_s = _empty_s(failures, stages, replicas)
        episode = Episode(tuple(failures), ends_s - started_s, empty_s)
        (history.outages if empty_s else history.degraded).add(episode, random)
        history.lasts_s = ends_s
        history.empty_s += empty_s
        history.failures += len(failures)
        if history.failures >= max_failures or history.outages.count >= _ENOUGH_OUTAGES:
            break
    return history


def _episodes(
    workers: int, mtbf_s: float, recovery_s: float, settle_s: float, random: Random
) -> Iterator[tuple[float, float, list[Failing]]]:
    """(when it begins, when it ends, failures), for ever. Times of failures count from its beginning."""
    falls = [(random.expovariate(1 / mtbf_s), worker) for worker in range(workers)]
    heapify(falls)
    while True:
        started_s = ends_s = falls[0][0]
        failures: list[Failing] = []
        while falls[0][0] <= ends_s and len(failures) < _MOST_FAILURES:
            fell_s, worker = falls[0]
            failures.append(Failing(fell_s - started_s, worker, recovery_s))
            ends_s = max(ends_s, fell_s + recovery_s + settle_s)
            heapreplace(falls, (fell_s + recovery_s + random.expovariate(1 / mtbf_s), worker))
        yield started_s, ends_s, failures


def _empty_s(failures: Sequence[Failing], stages: int, replicas: int) -> float:
    """For how long some stage has no replica."""
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
