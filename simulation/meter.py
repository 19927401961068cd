"""What became of the requests of a simulated run, and how long they took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from server.scheduler import Action, Answer, Event, Refuse, RequestArrived


class Meter:
    """Observes a run. Only requests that arrive from `since_s` on and before `until_s` count."""

    def __init__(self, since_s: float, until_s: float) -> None:
        self.latencies_s: list[float] = []
        """Of those answered."""
        self.refused: Counter[str] = Counter()
        """By reason."""
        self._since_s = since_s
        self._until_s = until_s
        self._arrived_s: dict[int, float] = {}

    def check(self, event: Event, actions: list[Action], now_s: float, wakeup_s: float | None) -> None:
        """Take note of an event and its actions."""
        if isinstance(event, RequestArrived) and self._since_s <= now_s < self._until_s:
            self._arrived_s[event.request] = now_s
        for action in actions:
            if isinstance(action, Answer):
                for request, _ in action.rows:
                    if (arrived_s := self._arrived_s.pop(request, None)) is not None:
                        self.latencies_s.append(now_s - arrived_s)
            elif isinstance(action, Refuse) and self._arrived_s.pop(action.request, None) is not None:
                self.refused[action.reason] += 1

    def check_finished(self) -> None:
        """Every request has got what it gets."""
        assert not self._arrived_s, "a request got neither answer nor refusal"


def quantile(weighted: Iterable[tuple[float, float]], share: float) -> float | None:
    """The least value such that values up to it hold this share of all weight; None of nothing.

    Args:
        weighted: (value, weight).
    """
    ordered = sorted(weighted)
    wanted = share * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        wanted -= weight
        if wanted <= 0:
            return value
    return ordered[-1][0] if ordered else None
