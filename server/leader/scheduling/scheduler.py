"""The scheduler: event in, actions out. The docstring of the package lists the rules."""

from __future__ import annotations

from itertools import count, islice

from multiworld_serving.server.leader.scheduling.actions import (
    Action,
    FailReplica,
    KeepOutput,
    Reject,
    SendBatch,
    SendKind,
)
from multiworld_serving.server.leader.scheduling.admission import rejection
from multiworld_serving.server.leader.scheduling.batches import (
    Attempt,
    Batch,
    Pool,
    Replica,
    Request,
    VersionPipeline,
)
from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from multiworld_serving.server.leader.scheduling.estimates.capacity import replicas_wanted
from multiworld_serving.server.leader.scheduling.events import (
    BatchDone,
    BatchFailed,
    Drain,
    Events,
    ReplicaDraining,
    ReplicaId,
    ReplicaLost,
    ReplicaReady,
    RequestArrived,
    RequestCancelled,
    Tick,
)
from multiworld_serving.server.leader.scheduling.state import SchedulerState

_MAX_UNMATCHED_FAILURES = 3
"""A replica is failed after this many consecutive batches that raised there and succeeded on another replica."""


class Scheduler(SchedulerState):
    """Forms batches from requests, assigns batches to replicas, and handles failures."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._batch_ids = count(1)

    # -- called by the driver ------------------------------------------------------------------------------------------------

    def handle(self, event: Events, now_s: float) -> list[Action]:
        """Handle one event, or requests that arrive together. Returns the actions to perform, in order, before the next event is handled.

        Args:
            now_s: monotonic time of the event. A time before that of the previous event counts as equal to it.
        Raises:
            ValueError: the event is invalid (unknown stage, or a request id that is still open).
        """
        self.now_s = max(now_s, self.now_s)
        self.actions = []
        self._apply(event)
        self._expire_deadlines()
        self._fail_hung_replicas()
        self._expire_graces()
        self.release_drained()
        self._find_late()
        self._dispatch()
        return self.actions

    def next_wakeup_s(self) -> float | None:
        """When the next `Tick` is due at the latest; None if no timer is set."""
        times = (
            self.backlog.deadlines.least(),
            self.table.hang_deadlines.least(),
            self.table.grace_deadlines.least(),
            self.hedging.late.least(),
            self.next_batch_s,
        )
        return min([time_s for time_s in times if time_s is not None], default=None)

    def replicas_wanted(self, now_s: float) -> tuple[float, ...]:
        """Replicas that each stage needs for the load of this leader, as fractions: see `estimates/capacity.py`."""
        rows, entry_pool = self.backlog.max_rows, self.table.entry_pool
        usual = rows * (len(entry_pool.accepting) if entry_pool else 0)
        waiting = max(0, len(self.backlog.waiting) - usual)
        rate_per_s, times = self.arrivals.per_s(now_s), self.service_times
        return replicas_wanted(rate_per_s, waiting, times, self.config.num_stages, rows)

    # -- events --------------------------------------------------------------------------------------------------------------

    def _apply(self, event: Events) -> None:
        match event:
            case list():
                for arrived in event:
                    self._arrived(arrived)
            case RequestArrived():
                self._arrived(event)
            case BatchDone() | BatchFailed():
                self._returned(event)
            case RequestCancelled():
                self._cancelled(event)
            case ReplicaReady():
                self._replica_ready(event)
            case ReplicaDraining():
                self._replica_draining(event)
            case ReplicaLost():
                self._replica_lost(event)
            case Drain():
                self.draining = True
            case Tick():
                pass

    def _arrived(self, event: RequestArrived) -> None:
        now_s, ids = self.now_s, range(event.request, event.request + event.rows)
        for each in ids:
            if each in self.backlog.requests:
                raise ValueError(f"request {each} is still open")
        self.arrivals.arrived(now_s, event.rows)
        if event.route:
            self._step_arrived(event)
        elif (rejected := rejection(event, self)) is None:
            for each in ids:
                self.backlog.admit(Request(each, event.deadline_s, now_s, now_s, event.key))
        else:
            self.actions.append(rejected)

    def _step_arrived(self, event: RequestArrived) -> None:
        """A request of a session waits for the replicas that keep it, whatever the length of the queue."""
        if not self.is_open(event.route):
            self.actions.append(Reject(event.request, "session_lost", "a replica that kept the session is gone"))
            return
        for each in range(event.request, event.request + event.rows):
            request = Request(each, event.deadline_s, self.now_s, self.now_s, event.key, event.route)
            self.backlog.admit_step(request)
            self.steps.setdefault(event.route, {})[each] = request

    def _cancelled(self, event: RequestCancelled) -> None:
        request = self.backlog.requests.get(event.request)
        if request is not None:
            self.close(request)

    def _replica_ready(self, event: ReplicaReady) -> None:
        if not 0 <= event.stage < self.config.num_stages:
            raise ValueError(f"replica {event.replica} is for stage {event.stage} of {self.config.num_stages}")
        if event.replica not in self.table.replicas:
            self.table.add(event.replica, event.stage, event.version, self.now_s)
            self.replicas_changed()

    def _replica_draining(self, event: ReplicaDraining) -> None:
        replica = self.table.replicas.get(event.replica)
        if replica is not None and replica.id not in self.table.draining:
            self.table.draining[replica.id] = replica
            self.table.stop_accepting(replica, self.now_s)
            self.replicas_changed()

    def _replica_lost(self, event: ReplicaLost) -> None:
        replica = self.table.replicas.get(event.replica)
        if replica is not None:
            self.fail_replica(replica, event.cause)

    # -- batches that return -----------------------------------------------------------------------------------------------

    def _returned(self, event: BatchDone | BatchFailed) -> None:
        """Free the attempt's place in the replica's window. Without effect on the batch if the attempt was abandoned."""
        replica = self.table.replicas.get(event.replica)
        attempt = replica.in_flight.get(event.batch) if replica else None
        if replica is None or attempt is None:
            return
        worked_s = self.table.record_returned(attempt, self.now_s)
        self.hedging.forget(attempt)
        if isinstance(event, BatchDone):
            self.service_times.observe(attempt, worked_s, event.computed_s, event.transfer_s)
            self.observed(attempt.replica.pool.stage)
        if not attempt.detach():
            return
        if isinstance(event, BatchDone):
            self._done(attempt, kept=event.kept)
        else:
            self._failed(attempt, event)

    def _done(self, attempt: Attempt, *, kept: bool) -> None:
        batch = attempt.batch
        attempt.replica.unmatched_failures = 0
        if attempt.kind == "hedge":
            self.counters.hedges["won"] += 1
        self.abandon_attempts(batch, hedges="lost")
        if batch.failed_on is not None:
            self._count_failure_of(batch.failed_on)
        if batch.stage + 1 == self.config.num_stages:
            self.answer(batch, attempt.replica)
            self.hold_steps(attempt)
        else:
            batch.advance(self.now_s)
            batch.hold_at(attempt.replica if kept else None)
            self.actions.append(KeepOutput(batch.id, attempt.replica.id, batch.stage))
            self.enqueue(batch, "first", at_head=False)

    def _failed(self, attempt: Attempt, event: BatchFailed) -> None:
        batch = attempt.batch
        self.attempt_failed(attempt)
        if batch.route:
            self.lose_sessions(batch)
        elif batch.in_flight:  # a hedge, or the attempt that was hedged
            batch.retried = True
        elif event.by_input and len(batch.rows) == 1:
            self.reject_all(batch, "invalid_input", f"an input has a value out of the model's range: {event.error}")
        elif batch.is_one_suspect:
            what = "stage {} raised" if event.sent else "the batch could not be sent to stage {}"
            self.reject_all(batch, "stage_error", f"{what.format(batch.stage)}: {event.error}")
        elif not event.sent or event.by_input or batch.retried or not batch.pool.has_other(attempt.replica):
            self.isolate(batch, parts=2)
        else:
            batch.retried = True
            batch.failed_on = attempt.replica
            batch.runnable_since_s = self.now_s
            self.enqueue(batch, "retry", at_head=False)

    def _count_failure_of(self, replica: Replica) -> None:
        """Count a failure of this replica: the batch on which it raised has succeeded elsewhere."""
        replica.unmatched_failures += 1
        known = self.table.replicas.get(replica.id) is replica
        if known and replica.unmatched_failures >= _MAX_UNMATCHED_FAILURES:
            self.actions.append(FailReplica(replica.id, "error"))
            self.fail_replica(replica, "error")

    # -- timers --------------------------------------------------------------------------------------------------------------

    def _expire_deadlines(self) -> None:
        while (request := self.backlog.deadlines.pop_until(self.now_s)) is not None:
            waited_s = self.now_s - request.arrived_s
            self.reject(request, "deadline", f"no answer after {waited_s:.3f} s")

    def _fail_hung_replicas(self) -> None:
        while (replica := self.table.hang_deadlines.pop_until(self.now_s)) is not None:
            self.actions.append(FailReplica(replica.id, "hang"))
            self.fail_replica(replica, "hang")

    def _expire_graces(self) -> None:
        while (pool := self.table.grace_deadlines.pop_until(self.now_s)) is not None:
            pool.expired = True
            for batch in pool.batches():
                self.reject_all(batch, "no_replica", self.table.no_replica_detail(pool.stage))
        if self.table.unavailable:
            for request in (*self.backlog.waiting.values(), *self.backlog.isolated.values()):
                self.reject(request, "no_replica", self.table.no_replica_detail())

    # -- sending -----------------------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Send everything that can be sent. Last stages first: they make room for new batches."""
        self.next_batch_s = None
        for pipeline in self.table.pipelines.values():
            for pool in reversed(pipeline.pools):
                self._dispatch_pool(pool)
        for route in tuple(self.steps):
            self._dispatch_steps(route)

    def _dispatch_steps(self, route: tuple[ReplicaId, ...]) -> None:
        """Send the requests of sessions with this route. While its first replica computes others, more gather for the next batch."""
        members, replica = self.steps[route], self.table.replicas.get(route[0])
        if replica is None or not self.is_open(route):
            for request in tuple(members.values()):
                self.reject(request, "session_lost", "a replica that kept the session is gone")
        elif replica.pool.has_room(replica) and not self.are_held(route, replica):
            taken = tuple(islice(members.values(), self.config.max_batch_size))
            for request in taken:
                del members[request.id]
            if not members:
                del self.steps[route]
            batch = self._form(taken, replica.pool.pipeline)
            batch.route, batch.stage = route, replica.pool.stage
            self._send(batch, replica)

    def _find_late(self) -> None:
        """Move late attempts to `Pool.late`. Start a batch again if its input is kept and the hedge is late, too."""
        while (late := self.hedging.late.pop_until(self.now_s)) is not None:
            batch = late.batch
            if len(batch.in_flight) == 1:
                late.replica.pool.late[late] = None
            elif batch.holder is not None and self.hedging.try_acquire(len(batch.rows)):
                self.restart(batch)

    def _dispatch_pool(self, pool: Pool) -> None:
        if pool.late and len(pool.available):
            self._hedge_late(pool)
        for batch in tuple(pool.routed.values()):
            replica = self.table.replicas[batch.route[pool.stage - self.config.num_stages]]
            if pool.has_room(replica):
                del pool.routed[batch.id]
                self._send(batch, replica)
        if pool.isolated_first:
            self._dispatch_isolated(pool)
        if pool.retries:
            self._dispatch_retries(pool)
        if pool.queue:
            self._dispatch_queue(pool)
        if pool is self.table.entry_pool:
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
        while not pipeline.saturated and (oldest := self.backlog.oldest()) and (replica := available.first()):
            due_s = self.due_s(oldest, replica)
            if (key := self.key_due(oldest, due_s)) is None:
                self.next_batch_s = due_s
                return
            self._send(self._form(self.backlog.take(key), pipeline), replica)

    def _dispatch_isolated(self, pool: Pool) -> None:
        from_backlog = pool is self.table.entry_pool and self.backlog.isolated and not pool.pipeline.isolation_saturated
        if not pool.isolated and not from_backlog:
            reserved = pool.reserved
            if reserved is not None and not any(each.batch.isolated for each in reserved.in_flight.values()):
                pool.release()
            return
        replica = pool.reserve()
        if replica is None or replica.in_flight:
            return
        if pool.isolated:
            self._send(pool.isolated.popitem(last=False)[1], replica)
        else:
            self._send(self._form(self.backlog.take_isolated(), pool.pipeline), replica)

    def _form(self, requests: tuple[Request, ...], pipeline: VersionPipeline) -> Batch:
        batch = Batch(
            id=next(self._batch_ids),
            rows=requests,
            pipeline=pipeline,
            isolated=requests[0].part is not None,
            retried=requests[0].part is not None,
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
            if not self.hedging.try_acquire(len(late.batch.rows)):
                break
            late.hedged = True
            del pool.late[late]
            self._put_in_flight(late.batch, other, "hedge", waited_s=self.now_s - late.sent_s)

    def _send(self, batch: Batch, replica: Replica) -> None:
        if batch.kind == "reroute":
            batch.attempt += 1
            self.counters.reroutes[batch.stage] += 1
        elif batch.kind == "retry":
            batch.attempt += 1
            self.counters.retries[batch.stage] += 1
        self._put_in_flight(batch, replica, batch.kind, waited_s=self.now_s - batch.runnable_since_s)
        self.hedging.refill_budget(len(batch.rows))

    def _put_in_flight(self, batch: Batch, replica: Replica, kind: SendKind, *, waited_s: float) -> None:
        attempt = Attempt(batch, replica, kind, self.now_s)
        batch.in_flight[replica.id] = attempt
        self.table.record_sent(attempt)
        if not batch.route and (kind != "hedge" or batch.holder is not None):
            self.hedging.watch(attempt, self.now_s)
        self.actions.append(
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
