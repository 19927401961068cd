"""What happens when replicas are lost, drained or added: batches are recovered from lost replicas and moved between queues."""

from __future__ import annotations

from multiworld_serving.server.scheduling.actions import ReleaseReplica
from multiworld_serving.server.scheduling.batch_lifecycle import BatchLifecycle
from multiworld_serving.server.scheduling.batches import Attempt, Batch, Pool, Replica
from multiworld_serving.server.scheduling.state import SchedulerState


class FailureHandler:
    """Removes replicas, recovers their batches, and counts broken worlds per request."""

    def __init__(self, state: SchedulerState, lifecycle: BatchLifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle

    def fail_replica(self, replica: Replica, cause: str) -> None:
        """Remove a replica and recover its batches.

        A batch in flight returns to the head of its stage's queue. If its requests have broken too many worlds, they are isolated or
        rejected. Batches whose input it kept start again, once no attempt is in flight elsewhere.
        """
        blame = cause != "left" and not replica.draining
        self._state.table.remove(replica, self._state.now_s)
        self.replicas_changed()
        lost = reversed(replica.in_flight.values())
        suspects = [attempt.batch for attempt in lost if attempt.detach() and self._attempt_lost(attempt, blame=blame)]
        for batch in reversed(suspects):
            self._lifecycle.isolate(batch)
        for batch in reversed(list(replica.held.values())):
            self._lifecycle.lose_input(batch)

    def release_drained(self) -> None:
        """Release the draining replicas that have no batches in flight and keep no input."""
        changed, self._state.changed_draining = self._state.changed_draining, {}
        for replica in changed:
            known = self._state.table.replicas.get(replica.id) is replica
            if known and not replica.in_flight and not replica.held:
                self._state.table.remove(replica, self._state.now_s)
                self.replicas_changed()
                self._state.actions.append(ReleaseReplica(replica.id))

    def attempt_failed(self, attempt: Attempt, *, suspect: bool = False) -> None:
        """Count a failed hedge, and let the batch's other attempt, if there is one, be hedged in turn.

        Suspects are not hedged: each further hedge could break another world.
        """
        if attempt.kind == "hedge":
            self._state.counters.hedges["wasted"] += 1
        if not suspect:
            for other in attempt.batch.in_flight.values():
                self._state.hedging.watch(other, self._state.now_s)

    def replicas_changed(self) -> None:
        """Update queues and versions. Call after replicas were added or removed."""
        for pipeline in self._state.table.pipelines.values():
            for pool in pipeline.pools:
                self._state.changed_pools[pool] = None
                self._requeue_stranded(pool)
        self._state.table.drop_unused_versions()

    def _attempt_lost(self, attempt: Attempt, *, blame: bool) -> bool:
        """Handle an attempt whose replica was lost. Returns True if its requests must be isolated."""
        batch = attempt.batch
        self._state.hedging.unwatch(attempt)
        requests = [request for _, request in batch.open_requests()]
        for request in requests if blame else ():
            request.worlds_broken += 1
        worlds_broken = max((request.worlds_broken for request in requests), default=0)
        suspect = worlds_broken >= self._state.config.max_attempts - 1
        self.attempt_failed(attempt, suspect=suspect)
        if batch.in_flight:  # a hedge, or the attempt that was hedged
            return False
        if not batch.isolated and suspect:
            return True
        if batch.isolated and blame and worlds_broken >= self._state.config.max_attempts:
            detail = f"it broke {worlds_broken} worlds, the last one alone"
            self._lifecycle.reject_all(batch, "poison", detail)
        else:
            batch.runnable_since_s = self._state.now_s
            batch.failed_on = None
            self._lifecycle.enqueue(batch, "reroute", at_head=True)
        return False

    def _requeue_stranded(self, pool: Pool) -> None:
        """Move batches that can no longer be sent from this queue: another version is complete, or a retry has no other replica."""
        stranded: list[Batch] = []
        if not pool.accepting and self._state.table.current is not None:
            stranded = pool.batches()
        elif len(pool.accepting) == 1:
            stranded = [batch for batch in pool.retries.values() if not pool.has_other(batch.failed_on)]
        for batch in reversed(stranded):
            pool.dequeue(batch)
            if pool.accepting:
                self._lifecycle.isolate(batch)
            else:
                self._lifecycle.requeue(batch)
