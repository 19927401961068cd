"""Decides when to start and stop workers: up at once, down slowly. Pure: no clock, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from multiworld_serving.common.service.capacity_report import CapacityReport, combine


@dataclass(frozen=True, slots=True)
class Limits:
    """Numbers of workers of all stages together, except `replicas`."""

    least: int
    most: int
    replicas: int
    """Workers that each stage keeps for redundancy."""
    spares: int = 0
    down_after_s: float = 60.0
    """The highest need of this time counts."""


@dataclass(frozen=True, slots=True)
class Grow:
    """Start workers until there are `count`."""

    count: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop this worker, after it has returned its batches."""

    worker: str


class ScalingPolicy:
    """Remembers the recent needs."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._began_s: float | None = None
        self._recent: deque[tuple[float, tuple[int, ...]]] = deque()
        """Time and need, falling: an earlier need that is not higher in any stage than a later one has no effect and is not kept."""

    def decide(
        self, reports: Sequence[CapacityReport | None], workers: Collection[str], now_s: float
    ) -> Grow | Stop | None:
        """What to do now; None: nothing.

        Args:
            reports: the last report of each leader, None if it is too old. If all are None, the workers stay as they are. If some are
                None, workers are started but not stopped, because the load of those leaders is not known. The same holds for the first
                `down_after_s`, because an earlier load is not known.
            workers: names of the workers that run, are starting or will be restarted. Workers that are being stopped are not included.
        """
        known = [report for report in reports if report is not None]
        if not known:
            return None
        need = self._highest_need(combine((report.wanted for report in known), self._limits.replicas), now_s)
        self._began_s = now_s if self._began_s is None else self._began_s
        limits = self._limits
        count = min(limits.most, max(limits.least, sum(need) + limits.spares))
        if count > len(workers):
            return Grow(count)
        knows_enough = now_s - self._began_s >= limits.down_after_s and len(known) == len(reports)
        if count < len(workers) and knows_enough:
            return _surplus(need, known, workers)
        return None

    def _highest_need(self, need: tuple[int, ...], now_s: float) -> tuple[int, ...]:
        """The highest need of each stage in the last `down_after_s`."""
        recent = self._recent
        while recent and recent[0][0] <= now_s - self._limits.down_after_s:
            recent.popleft()
        while recent and all(before <= now for before, now in zip(recent[-1][1], need, strict=True)):
            recent.pop()
        recent.append((now_s, need))
        return tuple(max(stage) for stage in zip(*(each for _, each in recent), strict=True))


def _surplus(need: Sequence[int], reports: Sequence[CapacityReport], workers: Collection[str]) -> Stop | None:
    """Choose the worker to stop: the newest worker of the stage with the most replicas above its need.

    None if no stage has more replicas than it needs. A worker that has not joined a leader is neither counted nor stopped.
    """

    def slack(worker: str) -> int:
        """By how many replicas the stages of this worker exceed the need, at least."""
        found = [
            sum(name in workers for name in names) - wanted
            for report in reports
            for names, wanted in zip(report.serving, need, strict=True)
            if worker in names
        ]
        return min(found, default=0)

    best = max(workers, key=lambda worker: (slack(worker), len(worker), worker), default=None)
    return Stop(best) if best is not None and slack(best) > 0 else None
