"""Virtual time: what happens next."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush


class Agenda:
    """Things to do, by time; at equal times in the order in which they were put down."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._entries: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, do)

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._entries, (time_s, self._count, do))

    def step(self) -> bool:
        """Do the next thing; False if there is nothing left."""
        if not self._entries:
            return False
        self.now_s, _, do = heappop(self._entries)
        do()
        return True
