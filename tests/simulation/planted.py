"""Schedulers with a bug, to check that the simulation finds it."""

from __future__ import annotations

from dataclasses import replace

from multiworld_serving.server.scheduling.batches import Request
from multiworld_serving.server.scheduling.scheduler import (
    Action,
    Answer,
    BatchFailed,
    Event,
    InputLost,
    ReplicaLost,
    RequestArrived,
    RequestCancelled,
    Scheduler,
    SchedulerConfig,
)


class LosesBatches(Scheduler):
    """Drops the batches in flight when a replica breaks."""

    def handle(self, event: Event, now_s: float) -> list[Action]:
        if isinstance(event, ReplicaLost) and (replica := self._state.table.replicas.get(event.replica)):
            for attempt in replica.in_flight.values():
                self._state.hedging.unwatch(attempt)
            replica.in_flight.clear()
        return super().handle(event, now_s)


class AnswersTwice(Scheduler):
    """Answers a request again if it was rerouted."""

    def handle(self, event: Event, now_s: float) -> list[Action]:
        actions = super().handle(event, now_s)
        return [each for action in actions for each in _twice_if_rerouted(action)]


class ComputesForNobody(Scheduler):
    """Ignores clients that disconnect."""

    def handle(self, event: Event, now_s: float) -> list[Action]:
        return super().handle(RequestCancelled(0) if isinstance(event, RequestCancelled) else event, now_s)


class MissesDeadlines(Scheduler):
    """Ignores deadlines."""

    def _expire_deadlines(self) -> None:
        self._state.backlog.deadlines.pop_until(self._state.now_s)


class LosesBatchesOfDoubleFaults(Scheduler):
    """Drops the batches in flight when a second replica of a stage breaks within a second of the first."""

    def handle(self, event: Event, now_s: float) -> list[Action]:
        if isinstance(event, ReplicaLost) and (replica := self._state.table.replicas.get(event.replica)):
            broke_s = vars(self).setdefault("broke_s", {})
            if now_s - broke_s.get(replica.pool.stage, -1e9) < 1.0:
                for attempt in replica.in_flight.values():
                    self._state.hedging.unwatch(attempt)
                replica.in_flight.clear()
            broke_s[replica.pool.stage] = now_s
        return super().handle(event, now_s)


class ForgetsHolders(Scheduler):
    """Sends a waiting batch whose input was lost with the replica that kept it."""

    def handle(self, event: Event, now_s: float) -> list[Action]:
        if isinstance(event, ReplicaLost) and (replica := self._state.table.replicas.get(event.replica)):
            for batch in list(replica.held.values()):
                batch.hold_at(None)
        return super().handle(event, now_s)


class RetriesLostInputs(Scheduler):
    """Treats a lost input as an exception of the stage: the batch goes to another replica, with the same input."""

    def handle(self, event: Event, now_s: float) -> list[Action]:
        if isinstance(event, InputLost):
            event = BatchFailed(event.batch, event.replica, "no input")
        return super().handle(event, now_s)


class ForgetsLostInputs(Scheduler):
    """Lets the outputs of a request that lost an input stay at replicas again."""

    def handle(self, event: Event, now_s: float) -> list[Action]:
        for request in self._state.backlog.requests.values():
            request.inputs_lost = 0
        return super().handle(event, now_s)


class MixesKeys(Scheduler):
    """Forgets the keys of requests."""

    def handle(self, event: Event, now_s: float) -> list[Action]:
        return super().handle(replace(event, key="") if isinstance(event, RequestArrived) else event, now_s)


class StarvesRareKeys(Scheduler):
    """Sends a key that fills a batch before a request that has waited longer."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        backlog = self._state.backlog
        oldest = backlog.oldest
        setattr(  # noqa: B010 - mypy rejects an assignment to a method
            backlog, "oldest", lambda: self._of_full_group() or oldest()
        )

    def _of_full_group(self) -> Request | None:
        backlog = self._state.backlog
        return next((each for each in backlog.waiting.values() if backlog.is_full(each.group)), None)


def _twice_if_rerouted(action: Action) -> list[Action]:
    return [action, action] if isinstance(action, Answer) and action.attempts > 1 else [action]
