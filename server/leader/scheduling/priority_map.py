"""A dictionary ordered by priority. Used for timers and for replicas by load."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
P = TypeVar("P", float, "tuple[int, int]")

_SLACK = 64


class PriorityMap(Generic[K, P]):
    """Keys with priorities, least first; equal priorities in the order in which they were set.

    A heap with lazy deletion: changing a priority pushes a new entry, and the old one is skipped when it reaches the top. The heap
    is rebuilt when most entries are stale, so every operation costs O(log n) amortised and memory is O(n).
    """

    def __init__(self) -> None:
        self._entries: dict[K, tuple[P, int, K]] = {}
        self._heap: list[tuple[P, int, K]] = []
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def set(self, key: K, priority: P) -> None:
        """Add the key, or change its priority."""
        self._pushes += 1
        entry = (priority, self._pushes, key)
        self._entries[key] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def discard(self, key: K) -> None:
        """Remove the key if present."""
        self._entries.pop(key, None)

    def first(self, excluding: K | None = None) -> K | None:
        """The key with the least priority, other than `excluding`; None if there is none."""
        top = self._top()
        if top is None or top[2] is not excluding:
            return top[2] if top else None
        heappop(self._heap)
        second = self._top()
        heappush(self._heap, top)
        return second[2] if second else None

    def least(self) -> P | None:
        """The least priority; None if empty."""
        top = self._top()
        return top[0] if top else None

    def pop_until(self, limit: P) -> K | None:
        """Remove and return the first key if its priority is at most `limit`; None otherwise."""
        if not self._heap or self._heap[0][0] > limit:  # stale entries are not later than the first key
            return None
        top = self._top()
        if top is None or top[0] > limit:
            return None
        heappop(self._heap)
        del self._entries[top[2]]
        return top[2]

    def _top(self) -> tuple[P, int, K] | None:
        heap: list[Any] = self._heap
        entries: dict[K, Any] = self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry[2]) is entry:
                return entry
            heappop(heap)
        return None
