"""Handles the loss of replicas: requeues, isolates or refuses their batches."""

from __future__ import annotations

from multiworld_serving.server.scheduling.actions import ReleaseReplica
from multiworld_serving.server.scheduling.batch_lifecycle import BatchLifecycle
from multiworld_serving.server.scheduling.config import SchedulerConfig
from multiworld_serving.server.scheduling.counters import Counters
from multiworld_serving.server.scheduling.dispatcher import Dispatcher
from multiworld_serving.server.scheduling.hedging import Hedging
from multiworld_serving.server.scheduling.replica_table import ReplicaTable
from multiworld_serving.server.scheduling.state import Attempt, Batch, Pool, Replica
from multiworld_serving.server.scheduling.step_context import StepContext


class FailureHandler:
    """Recovers the batches in flight on lost replicas and counts broken worlds per request."""

    def __init__(
        self,
        config: SchedulerConfig,
        dispatcher: Dispatcher,
        lifecycle: BatchLifecycle,
        step: StepContext,
        table: ReplicaTable,
        hedging: Hedging,
        counters: Counters,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._lifecycle = lifecycle
        self._step = step
        self._table = table
        self._hedging = hedging
        self._counters = counters

    def fail_replica(self, replica: Replica, cause: str) -> None:
        """Remove a replica and recover its batches.

        A batch returns to the head of its stage's queue. If its requests have broken too many worlds, they are isolated or refused.
        """
        blame = cause != "left" and not replica.draining
        self._table.remove(replica, self._step.now_s)
        self.replicas_changed()
        lost = reversed(replica.in_flight.values())
        suspects = [attempt.batch for attempt in lost if attempt.detach() and self._attempt_lost(attempt, blame=blame)]
        for batch in reversed(suspects):
            self._lifecycle.isolate(batch)

    def release_if_drained(self, replica: Replica) -> None:
        """Release a draining replica that has no batches in flight."""
        if replica.draining and not replica.in_flight:
            self._table.remove(replica, self._step.now_s)
            self.replicas_changed()
            self._step.actions.append(ReleaseReplica(replica.id))

    def other_attempt_remains(self, attempt: Attempt, *, suspect: bool = False) -> bool:
        """Whether the batch of this failed attempt has another attempt in flight.

        That attempt may be hedged in turn, but not if the requests are suspects: each further hedge could break another world.
        """
        if attempt.kind == "hedge":
            self._counters.hedges["wasted"] += 1
        for other in attempt.batch.in_flight.values() if not suspect else ():
            self._hedging.watch(other, self._step.now_s)
        return bool(attempt.batch.in_flight)

    def replicas_changed(self) -> None:
        """Update queues and versions. Call after replicas were added or removed."""
        for pipeline in self._table.pipelines.values():
            for pool in pipeline.pools:
                self._dispatcher.mark_dirty(pool)
                self._requeue_stranded(pool)
        self._table.drop_unused_versions()

    def _attempt_lost(self, attempt: Attempt, *, blame: bool) -> bool:
        """Handle an attempt whose replica was lost. Returns True if its requests must be isolated."""
        batch = attempt.batch
        self._hedging.unwatch(attempt)
        worlds_broken = self._worlds_broken(batch, one_more=blame)
        suspect = worlds_broken >= self._config.max_attempts - 1
        if self.other_attempt_remains(attempt, suspect=suspect):
            return False
        if not batch.isolated and suspect:
            return True
        if batch.isolated and blame and worlds_broken >= self._config.max_attempts:
            detail = f"it broke {worlds_broken} worlds, the last one alone"
            self._lifecycle.refuse_all(batch, "poison", detail)
        else:
            batch.runnable_since_s = self._step.now_s
            batch.failed_on = None
            self._lifecycle.enqueue(batch, "reroute", at_head=True)
        return False

    def _worlds_broken(self, batch: Batch, *, one_more: bool) -> int:
        """Add `one_more` to the broken worlds of every open request. Returns the highest count."""
        highest = 0
        for _, request in batch.open_requests():
            request.worlds_broken += one_more
            highest = max(highest, request.worlds_broken)
        return highest

    def _requeue_stranded(self, pool: Pool) -> None:
        """Move batches that wait in vain: another version is complete, or a retry has no other replica."""
        stranded: list[Batch] = []
        if not pool.accepting and self._table.current is not None:
            stranded = pool.batches()
        elif len(pool.accepting) == 1:
            stranded = [batch for batch in pool.retries.values() if not pool.has_other(batch.failed_on)]
        for batch in reversed(stranded):
            pool.dequeue(batch)
            if pool.accepting:
                self._lifecycle.isolate(batch)
            else:
                self._lifecycle.restart(batch)
