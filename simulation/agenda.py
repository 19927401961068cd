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

    @property
    def next_s(self) -> float:
        """When the next thing is to be done; infinity if there is nothing left."""
        return self._entries[0][0] if self._entries else float("inf")

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        """Put something down for later."""
        self.at(self.now_s + delay_s, do)

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        """Put something down for a time that is not past."""
        self._count += 1
        heappush(self._entries, (time_s, self._count, do))

    def step(self) -> bool:
        """Do the next thing; False if there is nothing left."""
        if not self._entries:
            return False
        self.now_s, _, do = heappop(self._entries)
        do()
        return True
