"""Threads, descriptors and memory of leader and workers over time, and whether they stay flat."""

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from types import TracebackType
from typing import Self

import httpx

from chaos.containers import ContainerError
from chaos.processes import Resources, resources
from chaos.target import Target

SHORTEST_S = 300.0
"""Less than this says nothing about growth."""
ALLOWED = {"threads": (2.0, 0.0), "descriptors": (4.0, 0.0), "resident_mib": (8.0, 0.05)}
"""By how much, and by which share, the median of the last quarter may exceed that of the second one."""
RULE = (
    "flat: the median of the last quarter of the time is at most that of the second quarter plus 2 threads, 4 descriptors, "
    "and 5 % or 8 MiB of resident memory, whichever is more; the first quarter is for warming up"
)


@dataclass(frozen=True, slots=True)
class Series:
    """One figure of one process over time.

    Attributes:
        flat: by the rule; None when the time was too short to tell.
    """

    process: str
    figure: str
    first: float
    last: float
    last_quarter: float
    flat: bool | None


class ResourceWatch:
    """Looks at `/proc` once every `every_s` in a thread of its own. Use as `with`.

    Workers count by process: one that was killed ends its series, and its successor begins another.
    """

    def __init__(self, target: Target, every_s: float = 1.0) -> None:
        self._target = target
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="chaos-resources", daemon=True)
        self._seen: dict[str, list[tuple[float, Resources]]] = {}
        self._since_s = 0.0

    def __enter__(self) -> Self:
        self._since_s = time.monotonic()
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def series(self) -> list[Series]:
        """Of the leader, and of each worker that is still there and lived for at least half of the time."""
        now_s = time.monotonic()
        lived = {
            name: seen
            for name, seen in self._seen.items()
            if now_s - seen[-1][0] < 10 * self._every_s and seen[-1][0] - seen[0][0] >= (now_s - self._since_s) / 2
        }
        return [each for name, seen in sorted(lived.items()) for each in series(name, seen)]

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            self._look()

    def _look(self) -> None:
        try:
            found = {f"{name} pid {pid}": pid for name, pid in self._target.worker_pids().items()}
            leader = self._target.pid
        except (httpx.HTTPError, ContainerError):
            return
        if leader is not None:
            found["leader"] = leader
        for name, pid in found.items():
            try:
                self._seen.setdefault(name, []).append((time.monotonic(), resources(pid)))
            except OSError:  # killed just now
                self._seen = {other: seen for other, seen in self._seen.items() if other != name}


def series(process: str, seen: Sequence[tuple[float, Resources]]) -> list[Series]:
    """The figures of one process, from what was seen at which second."""
    first_s, last_s = seen[0][0], seen[-1][0]
    long_enough = last_s - first_s >= SHORTEST_S
    found = []
    for figure, (more, share) in ALLOWED.items():
        values = [(at_s, float(asdict(held)[figure])) for at_s, held in seen]
        second, last = (_median(values, first_s, last_s, quarter) for quarter in (1, 3))
        flat = last <= second + max(more, share * second) if long_enough else None
        found.append(Series(process, figure, values[0][1], values[-1][1], last, flat))
    return found


def _median(values: Sequence[tuple[float, float]], first_s: float, last_s: float, quarter: int) -> float:
    step_s = (last_s - first_s) / 4
    inside = [v for at_s, v in values if first_s + quarter * step_s <= at_s <= first_s + (quarter + 1) * step_s]
    return median(inside or [value for _, value in values])
