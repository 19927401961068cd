"""What happens to batches: they wait, are answered, rejected, isolated or requeued, and recovered when their replica is lost."""

from __future__ import annotations

from multiworld_serving.server.scheduling.actions import Answer, FreeBatch, Reason, Reject, ReleaseReplica, SendKind
from multiworld_serving.server.scheduling.batches import Attempt, Batch, Pool, Replica, Request
from multiworld_serving.server.scheduling.state import SchedulerState


class BatchLifecycle:
    """Applies the scheduler's decisions about batches and requests, and keeps the backlog and the queues consistent."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def enqueue(self, batch: Batch, kind: SendKind, *, at_head: bool) -> None:
        """Put the batch into the queue of its stage. Requeue or reject its requests if they cannot be sent to that stage again."""
        batch.kind = kind
        pool = batch.pool
        if batch.input_lost or (not pool.accepting and self._state.table.current is not None):
            self.requeue(batch)
        elif pool.expired:
            self.reject_all(batch, "no_replica", self._state.table.no_replica_detail(batch.stage))
        else:
            pool.enqueue(batch, at_head=at_head)

    def requeue(self, batch: Batch) -> None:
        """Return the requests to the head of the backlog: they start again at the first stage."""
        requests = [request for _, request in batch.open_requests()]
        for request in reversed(requests):
            request.attempt = batch.attempt + 1
            self._state.backlog.requeue(request)
        self._free(batch)

    def restart(self, batch: Batch) -> None:
        """Requeue the requests, and abandon the attempts in flight: the replica that keeps their input may be frozen."""
        self.abandon_attempts(batch, hedges="wasted")
        self.requeue(batch)

    def lose_input(self, batch: Batch) -> None:
        """Send the input of the current stage no more. The requests start again unless an attempt in flight has it, and is not late."""
        batch.hold_at(None)
        batch.input_lost = True
        for attempt in batch.in_flight.values():
            self._state.hedging.forget(attempt)
            self._state.hedging.watch(attempt, self._state.now_s)
        if not batch.in_flight:
            batch.pool.dequeue(batch)
            self.requeue(batch)

    def isolate(self, batch: Batch) -> None:
        """Dissolve the batch. Each of its requests starts again at the first stage, alone."""
        for _, request in batch.open_requests():
            request.attempt = batch.attempt + 1
            request.runnable_since_s = self._state.now_s
            self._state.backlog.isolate(request)
        self._free(batch)

    def answer(self, batch: Batch, replica: Replica) -> None:
        """Answer the open requests with the output of the last stage."""
        open_requests = list(batch.open_requests())
        rows = tuple((request.id, row) for row, request in open_requests)
        self._state.actions.append(Answer(batch.id, replica.id, rows, batch.pipeline.version, batch.attempt))
        for _, request in open_requests:
            self._state.backlog.close(request)
            request.batch = None  # break the reference cycle, so that no garbage collection is needed
        self._free(batch)

    def reject_all(self, batch: Batch, reason: Reason, detail: str) -> None:
        """Reject every open request of the batch."""
        for _, request in list(batch.open_requests()):
            self.reject(request, reason, detail)

    def reject(self, request: Request, reason: Reason, detail: str) -> None:
        """Reject an open request."""
        self._state.actions.append(Reject(request.id, reason, detail))
        self.close(request)

    def close(self, request: Request) -> None:
        """Close a request. Closing the last open request of a batch ends the batch."""
        self._state.backlog.close(request)
        batch, request.batch = request.batch, None
        if batch is not None:
            batch.open_rows -= 1
            if not batch.open_rows:
                self._cancel(batch)

    def abandon_attempts(self, batch: Batch, *, hedges: str) -> None:
        """Ignore the output of the attempts in flight. They occupy their replica's window until they return.

        Args:
            hedges: the outcome to count for attempts that are hedges.
        """
        for attempt in batch.in_flight.values():
            self._state.hedging.forget(attempt)
            if attempt.kind == "hedge":
                self._state.counters.hedges[hedges] += 1
        batch.in_flight.clear()

    def fail_replica(self, replica: Replica, cause: str) -> None:
        """Remove a replica and recover its batches.

        A batch in flight returns to the head of its stage's queue. If its requests have broken too many worlds, they are isolated or
        rejected. Batches whose input it kept start again, once no attempt is in flight elsewhere.
        """
        blame = cause != "left" and replica.id not in self._state.table.draining
        self._state.table.remove(replica, self._state.now_s)
        self._state.hedging.refund(replica)
        self.replicas_changed()
        lost = reversed(replica.in_flight.values())
        suspects = [attempt.batch for attempt in lost if attempt.detach() and self._attempt_lost(attempt, blame=blame)]
        for batch in reversed(suspects):
            self.isolate(batch)
        for batch in reversed(list(replica.held.values())):
            self.lose_input(batch)

    def release_drained(self) -> None:
        """Release the draining replicas that have no batches in flight and keep no input.

        Batches whose input a draining replica keeps start again if their stage has no replica: the worker may leave to serve that stage.
        """
        table = self._state.table
        for replica in table.draining.values():
            for batch in reversed(list(replica.held.values())):
                if not batch.pool.accepting and not batch.in_flight:
                    self.lose_input(batch)
        for replica in [each for each in table.draining.values() if not each.in_flight and not each.held]:
            table.remove(replica, self._state.now_s)
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
                self._requeue_stranded(pool)
        self._state.table.drop_unused_versions()

    def _cancel(self, batch: Batch) -> None:
        batch.pool.dequeue(batch)
        self.abandon_attempts(batch, hedges="wasted")
        self._free(batch)

    def _free(self, batch: Batch) -> None:
        batch.hold_at(None)
        batch.pipeline.num_batches -= 1
        self._state.actions.append(FreeBatch(batch.id))

    def _attempt_lost(self, attempt: Attempt, *, blame: bool) -> bool:
        """Handle an attempt whose replica was lost. Returns True if its requests must be isolated."""
        batch = attempt.batch
        self._state.hedging.forget(attempt)
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
            self.reject_all(batch, "poison", detail)
        else:
            batch.runnable_since_s = self._state.now_s
            batch.failed_on = None
            self.enqueue(batch, "reroute", at_head=True)
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
                self.isolate(batch)
            else:
                self.requeue(batch)
