"""Forms batches and assigns them to replicas."""

from __future__ import annotations

from itertools import count

from multiworld_serving.server.scheduling.actions import SendBatch, SendKind
from multiworld_serving.server.scheduling.backlog import Backlog
from multiworld_serving.server.scheduling.config import SchedulerConfig
from multiworld_serving.server.scheduling.counters import Counters
from multiworld_serving.server.scheduling.hedging import Hedging
from multiworld_serving.server.scheduling.replica_table import ReplicaTable
from multiworld_serving.server.scheduling.service_times import ServiceTimes
from multiworld_serving.server.scheduling.state import Attempt, Batch, Pool, Replica, Request, VersionPipeline
from multiworld_serving.server.scheduling.step_context import StepContext


class Dispatcher:
    """Sends requests from the backlog and batches from the pools' queues to replicas with room in their window."""

    def __init__(
        self,
        config: SchedulerConfig,
        step: StepContext,
        backlog: Backlog,
        table: ReplicaTable,
        hedging: Hedging,
        times: ServiceTimes,
        counters: Counters,
    ) -> None:
        self._step = step
        self._config = config
        self._backlog = backlog
        self._table = table
        self._hedging = hedging
        self._times = times
        self._counters = counters
        self._batch_ids = count(1)
        self._dirty: dict[Pool, None] = {}
        self.flush_partial = False
        """Send partial batches at once, because the server is stopping."""

    def mark_dirty(self, pool: Pool) -> None:
        """Visit this pool in the next dispatch, because it has changed."""
        self._dirty[pool] = None

    def dispatch(self) -> None:
        """Send everything that can be sent. Last stages first: they make room for new batches."""
        dirty, self._dirty = self._dirty, {}
        entry_pool = self._table.entry_pool
        if entry_pool is not None:
            dirty[entry_pool] = None
        for pool in sorted(dirty, key=_last_stage_first) if len(dirty) > 1 else dirty:
            self._dispatch_pool(pool)

    def hedge(self) -> None:
        """Send a second attempt of every late batch, if another replica has room and the budget allows it."""
        late: list[Attempt] = []
        while (attempt := self._hedging.late.pop_until(self._step.now_s)) is not None:
            late.append(attempt)
        for attempt in late:
            if len(attempt.batch.in_flight) == 1 and not self._hedge(attempt):
                self._hedging.watch(attempt, self._step.now_s)
        if self._table.entry_pool is not None:  # a hedge took a replica: another one is now the least loaded
            self._form_batches(self._table.entry_pool.pipeline)

    def next_batch_s(self) -> float | None:
        """When the oldest waiting request is due; None if it waits for something other than time."""
        oldest, entry_pool = self._backlog.oldest(), self._table.entry_pool
        if (
            oldest is None
            or entry_pool is None
            or entry_pool.pipeline.saturated
            or (replica := entry_pool.available.first()) is None
        ):
            return None
        return self._due_s(oldest, replica)

    def _dispatch_pool(self, pool: Pool) -> None:
        if pool.isolated_first:
            self._dispatch_isolated(pool)
        self._dispatch_retries(pool)
        self._dispatch_queue(pool)
        if pool is self._table.entry_pool:
            self._form_batches(pool.pipeline)
        self._dispatch_isolated(pool)
        pool.isolated_first = True

    def _dispatch_retries(self, pool: Pool) -> None:
        for batch in tuple(pool.retries.values()):
            if not len(pool.available):
                return
            # A batch that failed on the only available replica does not block the others.
            replica = pool.available.first(excluding=batch.failed_on)
            if replica is not None:
                del pool.retries[batch.id]
                self._send(batch, replica)

    def _dispatch_queue(self, pool: Pool) -> None:
        while pool.queue and (replica := pool.available.first()) is not None:
            self._send(pool.queue.popitem(last=False)[1], replica)

    def _form_batches(self, pipeline: VersionPipeline) -> None:
        available = pipeline.pools[0].available
        while not pipeline.saturated and (replica := available.first()) is not None and self._batch_due(replica):
            self._send(self._form(self._backlog.take(self._config.max_batch_size), pipeline), replica)

    def _batch_due(self, replica: Replica) -> bool:
        """Whether to send a batch to this replica, the least loaded one with room."""
        oldest = self._backlog.oldest()
        if oldest is None:
            return False
        full = len(self._backlog.waiting) >= self._config.max_batch_size
        return full or self.flush_partial or self._step.now_s >= self._due_s(oldest, replica)

    def _due_s(self, oldest: Request, replica: Replica) -> float:
        """When to send a partial batch. Waiting costs nothing until the replica is about to become idle."""
        due_s = oldest.arrived_s + self._config.batch_timeout_s
        if not self._config.adaptive_batching:
            return due_s
        if not replica.in_flight:
            return oldest.arrived_s
        next_send_s = self._times.next_send_s(replica)
        return due_s if next_send_s is None else max(due_s, next_send_s - self._config.batch_timeout_s)

    def _dispatch_isolated(self, pool: Pool) -> None:
        from_backlog = (
            pool is self._table.entry_pool and self._backlog.isolated and not pool.pipeline.isolation_saturated
        )
        if not pool.isolated and not from_backlog:
            if pool.reserved is not None and not _has_isolated(pool.reserved):
                pool.release()
            return
        replica = pool.reserve()
        if replica is None or replica.in_flight:
            return
        if pool.isolated:
            self._send(pool.isolated.popitem(last=False)[1], replica)
        else:
            self._send(self._form(self._backlog.take_isolated(), pool.pipeline), replica)

    def _form(self, requests: tuple[Request, ...], pipeline: VersionPipeline) -> Batch:
        batch = Batch(
            id=next(self._batch_ids),
            rows=requests,
            pipeline=pipeline,
            isolated=requests[0].isolated,
            resends=max(request.resends for request in requests),
            runnable_since_s=requests[0].runnable_since_s,
            open_rows=len(requests),
        )
        for request in requests:
            request.batch = batch
        pipeline.num_batches += 1
        self._counters.batches += 1
        return batch

    def _hedge(self, late: Attempt) -> bool:
        pool = late.replica.pool
        replica = pool.available.first(excluding=late.replica)
        if replica is None or not self._hedging.try_acquire(len(late.batch.rows)):
            return False
        self._put_in_flight(late.batch, replica, "hedge", waited_s=self._step.now_s - late.sent_s)
        self._counters.hedge_rows_sent += len(late.batch.rows)
        return True

    def _send(self, batch: Batch, replica: Replica) -> None:
        rows = len(batch.rows)
        if batch.kind == "reroute":
            batch.resends += 1
            self._counters.reroutes[batch.stage] += 1
        elif batch.kind == "retry":
            batch.resends += 1
            self._counters.retries[batch.stage] += 1
        self._put_in_flight(batch, replica, batch.kind, waited_s=self._step.now_s - batch.runnable_since_s)
        self._counters.rows_sent += rows
        self._hedging.refill_budget(rows)

    def _put_in_flight(self, batch: Batch, replica: Replica, kind: SendKind, *, waited_s: float) -> None:
        attempt = Attempt(batch, replica, kind, self._step.now_s)
        batch.in_flight[replica.id] = attempt
        self._table.record_sent(attempt)
        if kind != "hedge":
            self._hedging.watch(attempt, self._step.now_s)
        self._step.actions.append(
            SendBatch(
                batch=batch.id,
                stage=batch.stage,
                replica=replica.id,
                requests=tuple(request.id for request in batch.rows),
                version=batch.pipeline.version,
                kind=kind,
                attempt=1 + batch.resends,
                isolated=batch.isolated,
                waited_s=waited_s,
            )
        )


def _has_isolated(replica: Replica) -> bool:
    return any(attempt.batch.isolated for attempt in replica.in_flight.values())


def _last_stage_first(pool: Pool) -> int:
    return -pool.stage
