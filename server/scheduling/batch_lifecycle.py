"""What happens to batches: they wait, are answered, rejected, isolated or requeued."""

from __future__ import annotations

from multiworld_serving.server.scheduling.actions import Answer, FreeBatch, Reason, Reject, SendKind
from multiworld_serving.server.scheduling.batches import Batch, Replica, Request
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
            self._state.changed_pools[pool] = None

    def requeue(self, batch: Batch) -> None:
        """Return the requests to the head of the backlog: they start again at the first stage."""
        requests = [request for _, request in batch.open_requests()]
        for request in reversed(requests):
            request.attempt = batch.attempt + 1
            self._state.backlog.requeue(request)
        self._free(batch)

    def lose_input(self, batch: Batch) -> None:
        """Send the input of the current stage no more. The requests start again if no attempt is in flight that may have it."""
        self.move_input(batch, None)
        batch.input_lost = True
        for attempt in batch.in_flight.values():
            self._state.hedging.unwatch(attempt)
        if not batch.in_flight:
            batch.pool.dequeue(batch)
            self.requeue(batch)

    def move_input(self, batch: Batch, holder: Replica | None) -> None:
        """Record which replica keeps the input of the batch. A draining replica is released when it keeps none."""
        previous = batch.hold_at(holder)
        if previous is not None and previous.draining:
            self._state.changed_draining[previous] = None

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
        self._state.actions.append(
            Answer(batch.id, replica.id, rows, batch.pipeline.version, tuple(batch.path), batch.attempt)
        )
        for _, request in open_requests:
            self._state.backlog.close(request)
            request.batch = None  # break the reference cycle, so that no garbage collection is needed
        self._state.throughput.answered(len(rows), full=len(self._state.backlog.waiting) >= len(batch.rows))
        self._free(batch)

    def reject_all(self, batch: Batch, reason: Reason, detail: str) -> None:
        """Reject every open request of the batch."""
        for _, request in list(batch.open_requests()):
            self.reject(request, reason, detail)

    def reject(self, request: Request, reason: Reason, detail: str) -> None:
        """Reject an open request."""
        self._state.actions.append(Reject(request.id, reason, None, detail))
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
            self._state.hedging.unwatch(attempt)
            if attempt.kind == "hedge":
                self._state.counters.hedges[hedges] += 1
        batch.in_flight.clear()

    def _cancel(self, batch: Batch) -> None:
        batch.pool.dequeue(batch)
        self._state.changed_pools[batch.pool] = None
        self.abandon_attempts(batch, hedges="wasted")
        self._free(batch)

    def _free(self, batch: Batch) -> None:
        self.move_input(batch, None)
        batch.pipeline.num_batches -= 1
        self._state.actions.append(FreeBatch(batch.id))
