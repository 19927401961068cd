"""What a batch that returns from a replica leads to: the next stage, an answer, a retry, or a rejection."""

from __future__ import annotations

from multiworld_serving.server.scheduling.actions import FailReplica, KeepOutput
from multiworld_serving.server.scheduling.batch_lifecycle import BatchLifecycle
from multiworld_serving.server.scheduling.batches import Attempt, Replica
from multiworld_serving.server.scheduling.events import BatchDone, BatchFailed, InputLost
from multiworld_serving.server.scheduling.state import SchedulerState

_MAX_UNMATCHED_FAILURES = 3
"""A replica is failed after this many consecutive batches that raised there and succeeded on another replica."""


class Returns:
    """Handles the events of batches that return."""

    def __init__(self, state: SchedulerState, lifecycle: BatchLifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle

    def handle(self, event: BatchDone | BatchFailed | InputLost) -> None:
        """Free the attempt's place in the replica's window. Without effect on the batch if the attempt was abandoned."""
        replica = self._state.table.replicas.get(event.replica)
        attempt = replica.in_flight.get(event.batch) if replica else None
        if replica is None or attempt is None:
            return
        worked_s = self._state.table.record_returned(attempt, self._state.now_s)
        self._state.hedging.forget(attempt)
        if isinstance(event, BatchDone):
            self._state.service_times.observe(attempt, worked_s, event.computed_s, event.transfer_s)
            self._state.fit_batch_size()
        if not attempt.detach():
            return
        match event:
            case BatchDone():
                self._done(attempt, kept=event.kept)
            case BatchFailed():
                self._failed(attempt, event)
            case InputLost():
                self._lifecycle.attempt_failed(attempt)
                self._lifecycle.lose_input(attempt.batch)

    def _done(self, attempt: Attempt, *, kept: bool) -> None:
        batch = attempt.batch
        attempt.replica.unmatched_failures = 0
        if attempt.kind == "hedge":
            self._state.counters.hedges["won"] += 1
        self._lifecycle.abandon_attempts(batch, hedges="lost")
        if batch.failed_on is not None:
            self._count_failure_of(batch.failed_on)
        if batch.stage + 1 == self._state.config.num_stages:
            self._lifecycle.answer(batch, attempt.replica)
        else:
            batch.advance(self._state.now_s)
            batch.hold_at(attempt.replica if kept else None)
            self._state.actions.append(KeepOutput(batch.id, attempt.replica.id, batch.stage))
            self._lifecycle.enqueue(batch, "first", at_head=False)

    def _failed(self, attempt: Attempt, event: BatchFailed) -> None:
        batch = attempt.batch
        self._lifecycle.attempt_failed(attempt)
        if batch.in_flight:  # a hedge, or the attempt that was hedged
            batch.retried = True
        elif event.by_input and len(batch.rows) == 1:
            self._lifecycle.reject_all(
                batch, "invalid_input", f"an input has a value out of the model's range: {event.error}"
            )
        elif batch.isolated:
            what = "stage {} raised" if event.sent else "the batch could not be sent to stage {}"
            self._lifecycle.reject_all(batch, "stage_error", f"{what.format(batch.stage)}: {event.error}")
        elif not event.sent or event.by_input or batch.retried or not batch.pool.has_other(attempt.replica):
            self._lifecycle.isolate(batch)
        else:
            batch.retried = True
            batch.failed_on = attempt.replica
            batch.runnable_since_s = self._state.now_s
            self._lifecycle.enqueue(batch, "retry", at_head=False)

    def _count_failure_of(self, replica: Replica) -> None:
        """Count a failure of this replica: the batch on which it raised has succeeded elsewhere."""
        replica.unmatched_failures += 1
        known = self._state.table.replicas.get(replica.id) is replica
        if known and replica.unmatched_failures >= _MAX_UNMATCHED_FAILURES:
            self._state.actions.append(FailReplica(replica.id, "error"))
            self._lifecycle.fail_replica(replica, "error")
