"""Schedulers with a bug, to check that the simulation finds it."""

from __future__ import annotations

from multiworld_serving.server.scheduling.scheduler import (
    Action,
    Event,
    ReplicaLost,
    Scheduler,
)


class LosesBatches(Scheduler):
    """Drops the batches in flight when a replica breaks."""

    def handle(self, event: Event, now_s: float) -> list[Action]:
        if isinstance(event, ReplicaLost) and (replica := self._state.table.replicas.get(event.replica)):
            for attempt in replica.in_flight.values():
                self._state.hedging.unwatch(attempt)
            replica.in_flight.clear()
        return super().handle(event, now_s)


class MissesDeadlines(Scheduler):
    """Ignores deadlines."""

    def _expire_deadlines(self) -> None:
        self._state.backlog.deadlines.pop_until(self._state.now_s)
