"""Which consumers cannot fetch from which producers, as far as a leader was told."""

from __future__ import annotations

import time
from collections.abc import Callable

_REMEMBER_S = 60.0
_MAX_PAIRS = 10_000


class UnreachablePairs:
    """Remembers for a minute that a consumer could not reach a producer: tensors between the two are relayed meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._until_s: dict[str, dict[str, float]] = {}
        """By producer and consumer."""
        self._clock = clock

    def add(self, holder: str, consumer: str) -> None:
        """The consumer could not reach the producer."""
        now_s = self._clock()
        if sum(map(len, self._until_s.values())) >= _MAX_PAIRS:
            self._until_s.clear()
        self._until_s.setdefault(holder, {})[consumer] = now_s + _REMEMBER_S

    def __contains__(self, pair: tuple[str, str]) -> bool:
        holder, consumer = pair
        return consumer in self._consumers(holder)

    def any(self, holder: str) -> bool:
        """Whether there is a consumer that could not reach this producer."""
        return bool(self._consumers(holder))

    def _consumers(self, holder: str) -> dict[str, float]:
        consumers = self._until_s.get(holder)
        if consumers is None:
            return {}
        now_s = self._clock()
        current = {consumer: until_s for consumer, until_s in consumers.items() if until_s > now_s}
        if current:
            self._until_s[holder] = current
        else:
            del self._until_s[holder]
        return current
