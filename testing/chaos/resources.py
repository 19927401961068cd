"""Monitors threads, descriptors and memory of all processes, and checks that they do not grow."""

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Self

import httpx

from multiworld_serving.testing.chaos.system.containers import ContainerError
from multiworld_serving.testing.chaos.system.processes import Resources, resources
from multiworld_serving.testing.chaos.system.system_under_test import SystemUnderTest

SHORTEST_S = 300.0
"""Minimum duration to judge growth."""
ALLOWED = {"threads": (2.0, 0.0), "descriptors": (4.0, 0.0), "resident_mib": (8.0, 0.05)}
"""Allowed growth, absolute and relative, of the median from the second to the last quarter of the time."""
RULE = (
    "flat: the median of the last quarter of the time is at most that of the second quarter plus 2 threads, 4 descriptors, "
    "and 5 % or 8 MiB of resident memory, whichever is more; the first quarter is warm-up"
)


@dataclass(frozen=True, slots=True)
class Series:
    """One resource of one process over time.

    Attributes:
        flat: according to RULE; None if the time was too short to judge.
    """

    process: str
    figure: str
    first: float
    last: float
    last_quarter: float
    flat: bool | None


class ResourceMonitor:
    """Reads `/proc` every `every_s` in a background thread. Use as `with`.

    Each process has its own series; a restarted one begins a new one.
    """

    def __init__(self, system: SystemUnderTest, every_s: float = 1.0) -> None:
        self._system = system
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-resources", daemon=True)
        self._seen: dict[str, list[tuple[float, Resources]]] = {}
        self._since_s = 0.0

    def __enter__(self) -> Self:
        self._since_s = time.monotonic()
        self._poll()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def series(self) -> list[Series]:
        """Return the series of each process that still runs and ran for at least half of the time."""
        now_s = time.monotonic()
        lived = {
            name: seen
            for name, seen in self._seen.items()
            if now_s - seen[-1][0] < 10 * self._every_s and seen[-1][0] - seen[0][0] >= (now_s - self._since_s) / 2
        }
        return [each for name, seen in sorted(lived.items()) for each in series(name, seen)]

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._poll()

    def _poll(self) -> None:
        try:
            found = {f"{name} pid {pid}": pid for name, pid in self._system.worker_pids().items()}
            for kind in ("leader", "frontend"):
                found |= {f"{kind}-{slot} pid {pid}": pid for slot, pid in self._system.child_pids(kind).items()}
            supervisor = self._system.pid
        except (httpx.HTTPError, ContainerError):
            return
        if supervisor is not None:
            found["supervisor"] = supervisor
        for name, pid in found.items():
            try:
                self._seen.setdefault(name, []).append((time.monotonic(), resources(pid)))
            except OSError:  # ended in the meantime
                self._seen = {other: seen for other, seen in self._seen.items() if other != name}


def series(process: str, seen: Sequence[tuple[float, Resources]]) -> list[Series]:
    """Compute the series of one process from samples (time, resources)."""
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
