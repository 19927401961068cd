"""Records latencies and refusals of a simulated run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from multiworld_serving.server.scheduling.scheduler import Action, Answer, Event, Reject, RequestArrived


class Meter:
    """Observer that counts requests that arrive in [`since_s`, `until_s`)."""

    def __init__(self, since_s: float, until_s: float) -> None:
        self.latencies_s: list[float] = []
        """Latencies of answered requests."""
        self.refused: Counter[str] = Counter()
        """Number of refused requests by reason."""
        self._since_s = since_s
        self._until_s = until_s
        self._arrived_s: dict[int, float] = {}

    def check(self, event: Event, actions: list[Action], now_s: float, wakeup_s: float | None) -> None:
        """Record an event and its actions."""
        if isinstance(event, RequestArrived) and self._since_s <= now_s < self._until_s:
            self._arrived_s[event.request] = now_s
        for action in actions:
            if isinstance(action, Answer):
                for request, _ in action.rows:
                    if (arrived_s := self._arrived_s.pop(request, None)) is not None:
                        self.latencies_s.append(now_s - arrived_s)
            elif isinstance(action, Reject) and self._arrived_s.pop(action.request, None) is not None:
                self.refused[action.reason] += 1

    def check_finished(self) -> None:
        """Assert that every counted request was answered or refused."""
        assert not self._arrived_s, "a request was neither answered nor refused"


def quantile(weighted: Iterable[tuple[float, float]], share: float) -> float | None:
    """The weighted quantile: the smallest value whose cumulative weight reaches `share`; None if there are no values.

    Args:
        weighted: pairs (value, weight).
    """
    ordered = sorted(weighted)
    wanted = share * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        wanted -= weight
        if wanted <= 0:
            return value
    return ordered[-1][0] if ordered else None
