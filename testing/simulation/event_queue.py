"""Virtual time: the queue of future events."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class EventQueue:
    """Callbacks ordered by virtual time; callbacks with equal times run in insertion order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        """Schedule a callback `delay_s` from now."""
        self.at(self.now_s + delay_s, do)

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        """Schedule a callback at `time_s`, which must not be in the past."""
        self._count += 1
        heappush(self._entries, (time_s, self._count, do))

    def step(self) -> bool:
        """Advance the clock to the next callback and run it; returns False if the queue is empty."""
        if not self._entries:
            return False
        self.now_s, _, do = heappop(self._entries)
        do()
        return True
