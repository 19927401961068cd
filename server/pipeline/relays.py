"""Pairs of processes that cannot reach each other."""

from __future__ import annotations

_MAX_HOLDERS = 10_000


class Relays:
    """Their tensors pass the leader until one of the two joins again.

    A consumer opens its edge to a producer with the first fetch. If that fails, the leader relays between the two from then on.
    """

    def __init__(self) -> None:
        self._consumers: dict[str, set[str]] = {}
        """By producer, the names of the consumers that cannot reach it. No value is empty."""

    def add(self, holder: str, consumer: str) -> None:
        """This consumer could not fetch from the producer."""
        if len(self._consumers) >= _MAX_HOLDERS:  # a process that ended before its consumer reported it stays here
            del self._consumers[next(iter(self._consumers))]
        self._consumers.setdefault(holder, set()).add(consumer)

    def forget(self, holder: str, consumer: str) -> None:
        """A process has ended, or its link: it was known by these names as a producer and a consumer."""
        self._consumers.pop(holder, None)
        for each in [each for each, consumers in self._consumers.items() if consumer in consumers]:
            self._consumers[each].discard(consumer)
            if not self._consumers[each]:
                del self._consumers[each]

    def between(self, holder: str, consumer: str) -> bool:
        """Whether tensors of this producer pass the leader on their way to this consumer."""
        return consumer in self._consumers.get(holder, ())

    def needed_from(self, holder: str) -> bool:
        """Whether a consumer cannot reach this producer."""
        return holder in self._consumers
