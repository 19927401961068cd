"""State transitions of batches: enqueue, restart, isolate, answer, refuse."""

from __future__ import annotations

from multiworld_serving.server.scheduling.actions import Answer, FreeBatch, Reason, Refuse, SendKind
from multiworld_serving.server.scheduling.backlog import Backlog
from multiworld_serving.server.scheduling.counters import Counters
from multiworld_serving.server.scheduling.dispatcher import Dispatcher
from multiworld_serving.server.scheduling.events import RequestId
from multiworld_serving.server.scheduling.hedging import Hedging
from multiworld_serving.server.scheduling.replica_table import ReplicaTable
from multiworld_serving.server.scheduling.state import Batch, Replica, Request
from multiworld_serving.server.scheduling.step_context import StepContext
from multiworld_serving.server.scheduling.throughput_estimator import ThroughputEstimator


class BatchLifecycle:
    """Applies the scheduler's decisions about batches and requests, and keeps backlog, queues and counters consistent."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        step: StepContext,
        backlog: Backlog,
        table: ReplicaTable,
        hedging: Hedging,
        throughput: ThroughputEstimator,
        counters: Counters,
    ) -> None:
        self._dispatcher = dispatcher
        self._step = step
        self._backlog = backlog
        self._table = table
        self._hedging = hedging
        self._throughput = throughput
        self._counters = counters

    def enqueue(self, batch: Batch, kind: SendKind, *, at_head: bool) -> None:
        """Put the batch into the queue of its stage. Restart or refuse it if that stage has no replica and will get none."""
        batch.kind = kind
        pool = batch.pool
        if not pool.accepting and self._table.current is not None:
            self.restart(batch)
        elif pool.expired:
            self.refuse_all(batch, "no_replica", f"stage {batch.stage} has been without a replica for too long")
        else:
            pool.enqueue(batch, at_head=at_head)
            self._dispatcher.mark_dirty(pool)

    def restart(self, batch: Batch) -> None:
        """Requeue the requests at the head of the backlog: their version has lost this stage and another one is complete."""
        requests = [request for _, request in batch.open_requests()]
        for request in reversed(requests):
            request.resends = batch.resends + 1
            self._backlog.requeue(request)
        self._counters.restarted += len(requests)
        self._free(batch)

    def isolate(self, batch: Batch) -> None:
        """Dissolve the batch. Each of its requests starts again at the first stage, alone."""
        for _, request in batch.open_requests():
            request.resends = batch.resends + 1
            request.runnable_since_s = self._step.now_s
            self._backlog.isolate(request)
            self._counters.isolated += 1
        self._free(batch)

    def answer(self, batch: Batch, replica: Replica) -> None:
        """Answer the open requests with the output of the last stage."""
        open_requests = list(batch.open_requests())
        rows = tuple((request.id, row) for row, request in open_requests)
        self._step.actions.append(
            Answer(batch.id, replica.id, rows, batch.pipeline.version, tuple(batch.path), 1 + batch.resends)
        )
        for _, request in open_requests:
            self._backlog.close(request)
            request.batch = None  # break the reference cycle, so that no garbage collection is needed
        self._counters.answered += len(rows)
        self._throughput.answered(len(rows), full=len(self._backlog.waiting) >= len(batch.rows))
        self._free(batch)

    def refuse_all(self, batch: Batch, reason: Reason, detail: str) -> None:
        """Refuse every open request of the batch."""
        for _, request in list(batch.open_requests()):
            self.refuse(request, reason, detail)

    def refuse(self, request: Request, reason: Reason, detail: str) -> None:
        """Refuse an open request."""
        self.emit_refusal(request.id, reason, detail)
        self.close(request)

    def emit_refusal(self, request: RequestId, reason: Reason, detail: str, retry_after_s: float | None = None) -> None:
        """Emit the action and count it. Does not change the backlog."""
        self._counters.refused[reason] += 1
        self._step.actions.append(Refuse(request, reason, retry_after_s, detail))

    def close(self, request: Request) -> None:
        """Close a request. Closing the last open request of a batch ends the batch."""
        self._backlog.close(request)
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
            self._hedging.unwatch(attempt)
            if attempt.kind == "hedge":
                self._counters.hedges[hedges] += 1
        batch.in_flight.clear()

    def _cancel(self, batch: Batch) -> None:
        batch.pool.dequeue(batch)
        self._dispatcher.mark_dirty(batch.pool)
        self.abandon_attempts(batch, hedges="wasted")
        self._free(batch)

    def _free(self, batch: Batch) -> None:
        batch.pipeline.num_batches -= 1
        self._step.actions.append(FreeBatch(batch.id))
