"""Forms batches and assigns them to replicas."""

from __future__ import annotations

from itertools import count

from multiworld_serving.server.scheduling.actions import SendBatch, SendKind
from multiworld_serving.server.scheduling.batch_lifecycle import BatchLifecycle
from multiworld_serving.server.scheduling.batches import Attempt, Batch, Pool, Replica, Request, VersionPipeline
from multiworld_serving.server.scheduling.state import SchedulerState


class Dispatcher:
    """Sends requests from the backlog and batches from the pools' queues to replicas with room in their window."""

    def __init__(self, state: SchedulerState, lifecycle: BatchLifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._batch_ids = count(1)

    def dispatch(self) -> None:
        """Send everything that can be sent. Last stages first: they make room for new batches."""
        for pipeline in self._state.table.pipelines.values():
            for pool in reversed(pipeline.pools):
                self._dispatch_pool(pool)

    def find_late(self) -> None:
        """Move late attempts to `Pool.late`. Start a batch again if its input is lost, or is kept and the hedge is late, too."""
        hedging = self._state.hedging
        while (late := hedging.late.pop_until(self._state.now_s)) is not None:
            batch = late.batch
            if len(batch.in_flight) == 1 and not batch.input_lost:
                late.replica.pool.late[late] = None
            elif (batch.holder is not None or batch.input_lost) and hedging.try_acquire(len(batch.rows)):
                self._lifecycle.restart(batch)

    def next_batch_s(self) -> float | None:
        """When the oldest waiting request is due; None if it waits for something other than time."""
        oldest, entry_pool = self._state.backlog.oldest(), self._state.table.entry_pool
        if (
            oldest is None
            or entry_pool is None
            or entry_pool.pipeline.saturated
            or (replica := entry_pool.available.first()) is None
        ):
            return None
        return self._due_s(oldest, replica)

    def _dispatch_pool(self, pool: Pool) -> None:
        if pool.late and len(pool.available):
            self._hedge_late(pool)
        if pool.isolated_first:
            self._dispatch_isolated(pool)
        if pool.retries:
            self._dispatch_retries(pool)
        if pool.queue:
            self._dispatch_queue(pool)
        if pool is self._state.table.entry_pool:
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
        while (
            not pipeline.saturated
            and (replica := available.first()) is not None
            and (key := self._key_due(replica)) is not None
        ):
            self._send(self._form(self._state.backlog.take(key), pipeline), replica)

    def _key_due(self, replica: Replica) -> str | None:
        """The key of the next batch for this replica, the least loaded one with room; None if no batch is due."""
        backlog = self._state.backlog
        oldest = backlog.oldest()
        if oldest is None:
            return None
        full = backlog.is_full(oldest.key)
        if full or self._state.draining or self._state.now_s >= self._due_s(oldest, replica):
            return oldest.key
        return backlog.first_full

    def _due_s(self, oldest: Request, replica: Replica) -> float:
        """When to send a partial batch. Waiting costs nothing until the replica is about to become idle."""
        due_s = oldest.arrived_s + self._state.config.batch_timeout_s
        if not self._state.config.adaptive_batching:
            return due_s
        next_send_s = self._state.service_times.next_send_s(replica)
        if not replica.in_flight:
            return oldest.arrived_s if next_send_s is None else max(oldest.arrived_s, next_send_s)
        return due_s if next_send_s is None else max(due_s, next_send_s - self._state.config.batch_timeout_s)

    def _dispatch_isolated(self, pool: Pool) -> None:
        from_backlog = (
            pool is self._state.table.entry_pool
            and self._state.backlog.isolated
            and not pool.pipeline.isolation_saturated
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
            self._send(self._form(self._state.backlog.take_isolated(), pool.pipeline), replica)

    def _form(self, requests: tuple[Request, ...], pipeline: VersionPipeline) -> Batch:
        batch = Batch(
            id=next(self._batch_ids),
            rows=requests,
            pipeline=pipeline,
            isolated=requests[0].isolated,
            attempt=max(request.attempt for request in requests),
            runnable_since_s=requests[0].runnable_since_s,
            open_rows=len(requests),
        )
        for request in requests:
            request.batch = batch
        pipeline.num_batches += 1
        return batch

    def _hedge_late(self, pool: Pool) -> None:
        """Send a second attempt of the late batches for which another replica has room, as far as the budget allows it."""
        for late in tuple(pool.late):
            other = pool.available.first(excluding=late.replica)
            if other is None:
                continue
            if not self._state.hedging.try_acquire(len(late.batch.rows)):
                break
            late.hedged = True
            del pool.late[late]
            self._put_in_flight(late.batch, other, "hedge", waited_s=self._state.now_s - late.sent_s)

    def _send(self, batch: Batch, replica: Replica) -> None:
        if batch.kind == "reroute":
            batch.attempt += 1
            self._state.counters.reroutes[batch.stage] += 1
        elif batch.kind == "retry":
            batch.attempt += 1
            self._state.counters.retries[batch.stage] += 1
        self._put_in_flight(batch, replica, batch.kind, waited_s=self._state.now_s - batch.runnable_since_s)
        self._state.hedging.refill_budget(len(batch.rows))

    def _put_in_flight(self, batch: Batch, replica: Replica, kind: SendKind, *, waited_s: float) -> None:
        attempt = Attempt(batch, replica, kind, self._state.now_s)
        batch.in_flight[replica.id] = attempt
        self._state.table.record_sent(attempt)
        if kind != "hedge" or batch.holder is not None:
            self._state.hedging.watch(attempt, self._state.now_s)
        self._state.actions.append(
            SendBatch(
                batch=batch.id,
                stage=batch.stage,
                replica=replica.id,
                requests=tuple(request.id for request in batch.rows),
                version=batch.pipeline.version,
                kind=kind,
                attempt=batch.attempt,
                isolated=batch.isolated,
                waited_s=waited_s,
            )
        )


def _has_isolated(replica: Replica) -> bool:
    return any(attempt.batch.isolated for attempt in replica.in_flight.values())
