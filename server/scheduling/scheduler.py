"""The scheduler: forms batches from requests, assigns batches to replicas, and handles failures.

It is pure: no I/O, no clock, no randomness, no tasks. The same code runs in production and in the simulation.

    scheduler = Scheduler(SchedulerConfig(num_stages=2))
    for action in scheduler.handle(ReplicaReady("s0.r0#1@2", stage=0, version="v1"), now_s=time.monotonic()):
        perform(action)
    wake_at(scheduler.next_wakeup_s())  # then handle(Tick(), now_s)

The rules:

- Every accepted request gets exactly one `Answer` row or `Refuse`, by its deadline at the latest, unless it is cancelled.
- A batch is formed from the head of the queue when it is full or its oldest request has waited `batch_timeout_s`. With
  `adaptive_batching` a partial batch is sent at once to a replica of stage 0 that has nothing in flight; while all replicas are busy,
  it waits until one is about to become idle, estimated from recent service times.
- A batch is formed only when a replica of stage 0 has room and no later stage is saturated. Until then requests stay in the queue, and
  batches become larger. A batch keeps the model version that it began with.
- A batch goes to the replica with the fewest rows in flight. A replica has at most `window` batches in flight.
- A batch in flight on a lost replica goes to the head of its stage's queue, with the input that the driver stored. After
  `max_attempts - 1` broken worlds its requests are isolated: each starts again, alone in its batch and alone on its replica. A request
  that breaks a world alone is refused as poison. A replica that was draining, or was lost with cause "left", does not count.
- A batch whose stage raised is sent once more, to another replica. Then its requests are isolated; a request whose stage raises again
  is refused as stage_error. A batch that the driver failed to send is isolated at once.
- Work for a stage without replicas waits `recovery_grace_s`, counted from when the stage lost its last replica. Then it is refused, and
  so are new requests until the stage has a replica. Work whose version lost a stage starts again under another complete version.
- A late batch is hedged: it is sent to a second replica, and the first output wins.
- A replica with batches in flight that is silent for `hang_timeout_s` is failed. So is a replica that raised on several consecutive
  batches which then succeeded elsewhere.
- A request that cannot be answered by its deadline, at the rate at which full batches are answered, is refused on arrival.
- Late events (about a removed replica or an answered batch) have no effect.

An event costs O(log n) in the number of replicas and open requests.
"""

from __future__ import annotations

from multiworld_serving.server.scheduling.actions import (
    Action,
    Answer,
    FailReplica,
    FreeBatch,
    KeepOutput,
    Refusal,
    Refuse,
    ReleaseReplica,
    SendBatch,
)
from multiworld_serving.server.scheduling.backlog import Backlog
from multiworld_serving.server.scheduling.batch_lifecycle import BatchLifecycle
from multiworld_serving.server.scheduling.config import SchedulerConfig
from multiworld_serving.server.scheduling.counters import Counters
from multiworld_serving.server.scheduling.dispatcher import Dispatcher
from multiworld_serving.server.scheduling.events import (
    BatchDone,
    BatchFailed,
    Drain,
    Event,
    ReplicaDraining,
    ReplicaId,
    ReplicaLost,
    ReplicaReady,
    RequestArrived,
    RequestCancelled,
    Tick,
)
from multiworld_serving.server.scheduling.failure_handler import FailureHandler
from multiworld_serving.server.scheduling.hedging import Hedging
from multiworld_serving.server.scheduling.replica_table import ReplicaTable
from multiworld_serving.server.scheduling.service_times import ServiceTimes
from multiworld_serving.server.scheduling.state import Attempt, Replica, Request
from multiworld_serving.server.scheduling.step_context import StepContext
from multiworld_serving.server.scheduling.throughput_estimator import ThroughputEstimator

_MAX_UNMATCHED_FAILURES = 3
"""A replica is failed after this many consecutive batches that raised there and succeeded on another replica."""
_ADMISSION_MARGIN = 1.5
"""A request is accepted only if the time to its deadline is at least this many times the estimated completion time: a request
that expires in the queue has delayed others."""

__all__ = [
    "Action",
    "Answer",
    "BatchDone",
    "BatchFailed",
    "Drain",
    "Event",
    "FailReplica",
    "FreeBatch",
    "KeepOutput",
    "Refusal",
    "Refuse",
    "ReleaseReplica",
    "ReplicaDraining",
    "ReplicaLost",
    "ReplicaReady",
    "RequestArrived",
    "RequestCancelled",
    "Scheduler",
    "SchedulerConfig",
    "SendBatch",
    "Tick",
]


class Scheduler:
    """Event in, actions out. The rules are in the docstring of the module."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.counters = Counters()
        self._table = ReplicaTable(
            num_stages=config.num_stages,
            window=config.window,
            recovery_grace_s=config.recovery_grace_s,
            hang_timeout_s=config.hang_timeout_s,
        )
        self._backlog = Backlog()
        self._service_times = ServiceTimes()
        self._hedging = Hedging(config, self._service_times)
        self._step = StepContext()
        self._throughput = ThroughputEstimator()
        self._dispatcher = Dispatcher(
            config, self._step, self._backlog, self._table, self._hedging, self._service_times, self.counters
        )
        self._lifecycle = BatchLifecycle(
            self._dispatcher, self._step, self._backlog, self._table, self._hedging, self._throughput, self.counters
        )
        self._failures = FailureHandler(
            config, self._dispatcher, self._lifecycle, self._step, self._table, self._hedging, self.counters
        )
        self._draining = False

    # -- called by the driver ------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Handle one event. Returns the actions to perform, in order, before the next event is handled.

        Args:
            now_s: monotonic time of the event. A time before that of the previous event counts as equal to it.
        Raises:
            ValueError: the event is invalid (unknown stage, or a request id that is still open).
        """
        self._pass_time(now_s)
        self._step.actions = []
        self._apply(event)
        self._expire_deadlines()
        self._fail_silent_replicas()
        self._expire_graces()
        self._dispatcher.dispatch()
        self._dispatcher.hedge()
        return self._step.actions

    def next_wakeup_s(self) -> float | None:
        """When the next `Tick` is due at the latest; None if no timer is set."""
        times = (
            self._backlog.deadlines.least(),
            self._table.hang_deadlines.least(),
            self._table.grace_deadlines.least(),
            self._hedging.late.least(),
            self._dispatcher.next_batch_s(),
        )
        return min((time_s for time_s in times if time_s is not None), default=None)

    def refusal(self, deadline_s: float, now_s: float, *, ahead: int) -> Refusal | None:
        """Why a request that arrives now, after `ahead` others, would be refused; None if it would be accepted."""
        self._pass_time(now_s)
        return self._refusal(deadline_s, ahead)

    # -- statistics, O(number of versions) at most ---------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """A version is complete, and the scheduler is not draining."""
        return self._table.current is not None and not self._draining

    @property
    def current_version(self) -> str | None:
        """The version of new batches."""
        return self._table.current.version if self._table.current else None

    @property
    def queue_depth(self) -> int:
        """Requests that wait for a batch, including isolated requests."""
        return len(self._backlog.waiting) + len(self._backlog.isolated)

    @property
    def open_requests(self) -> int:
        """Accepted requests that are not closed. After `Drain`, zero means that all work is done."""
        return len(self._backlog.requests)

    def in_flight(self, replica: ReplicaId) -> int:
        """Batches in flight on this replica; 0 for an unknown replica."""
        known = self._table.replicas.get(replica)
        return len(known.in_flight) if known else 0

    def batches_of(self, version: str) -> int:
        """Batches of this version that have not ended. The version is in use while there are any."""
        pipeline = self._table.pipelines.get(version)
        return pipeline.num_batches if pipeline else 0

    def batches_waiting(self, stage: int) -> int:
        """Batches of all versions that wait for a replica of this stage."""
        return sum(pipeline.pools[stage].waiting for pipeline in self._table.pipelines.values())

    # -- events --------------------------------------------------------------------------------------------------------------

    def _pass_time(self, now_s: float) -> None:
        now_s = max(now_s, self._step.now_s)
        busy, full = bool(self._backlog.requests), len(self._backlog.waiting) >= self.config.max_batch_size
        full = full and self._table.current is not None  # with a stage missing, the rate does not reflect the capacity
        self._throughput.elapse(now_s - self._step.now_s, busy=busy, full=full)
        self._step.now_s = now_s

    def _apply(self, event: Event) -> None:
        match event:
            case RequestArrived():
                self._arrived(event)
            case BatchDone():
                self._done(event)
            case RequestCancelled():
                self._cancelled(event)
            case BatchFailed():
                self._failed(event)
            case ReplicaReady():
                self._replica_ready(event)
            case ReplicaDraining():
                self._replica_draining(event)
            case ReplicaLost():
                self._replica_lost(event)
            case Drain():
                self._dispatcher.flush_partial = True
                self._draining = not event.admits
            case Tick():
                pass

    def _arrived(self, event: RequestArrived) -> None:
        if event.request in self._backlog.requests:
            raise ValueError(f"request {event.request} is still open")
        refusal = self._refusal(event.deadline_s, ahead=0)
        if refusal is None:
            now_s = self._step.now_s
            self._backlog.admit(Request(event.request, event.deadline_s, arrived_s=now_s, runnable_since_s=now_s))
            self.counters.accepted += 1
        else:
            self._lifecycle.emit_refusal(event.request, *refusal)

    def _refusal(self, deadline_s: float, ahead: int) -> Refusal | None:
        if self._draining:
            return Refusal("draining", "the server is stopping")
        if not self._table.was_complete:
            return Refusal("not_ready", "not every stage has had a replica yet")
        if self._table.unavailable:
            return Refusal("no_replica", self._lost_detail())
        remaining_s = deadline_s - self._step.now_s
        if remaining_s <= 0:
            return Refusal("deadline", "the deadline had passed on arrival")
        return self._overload(ahead, remaining_s)

    def _overload(self, ahead: int, remaining_s: float) -> Refusal | None:
        waiting, open_requests = len(self._backlog.waiting) + ahead, len(self._backlog.requests) + ahead
        if waiting >= self.config.queue_limit:
            retry_after_s = self._throughput.expected_time_s(waiting)
            return Refusal("overloaded", f"the queue is full: {waiting} requests are waiting", retry_after_s)
        needed_s = _ADMISSION_MARGIN * self._throughput.min_time_s(open_requests)
        if needed_s > remaining_s:
            detail = f"{open_requests} requests are ahead, which takes about {needed_s:.1f} s; the deadline is in {remaining_s:.1f} s"
            return Refusal("overloaded", detail, needed_s - remaining_s)
        return None

    def _cancelled(self, event: RequestCancelled) -> None:
        request = self._backlog.requests.get(event.request)
        if request is not None:
            self.counters.cancelled += 1
            self._lifecycle.close(request)

    def _replica_ready(self, event: ReplicaReady) -> None:
        if not 0 <= event.stage < self.config.num_stages:
            raise ValueError(f"replica {event.replica} is for stage {event.stage} of {self.config.num_stages}")
        if event.replica not in self._table.replicas:
            self._table.add(event.replica, event.stage, event.version, self._step.now_s)
            self._failures.replicas_changed()

    def _replica_draining(self, event: ReplicaDraining) -> None:
        replica = self._table.replicas.get(event.replica)
        if replica is not None and not replica.draining:
            replica.draining = True
            self._table.stop_accepting(replica, self._step.now_s)
            self._failures.replicas_changed()
            self._failures.release_if_drained(replica)

    def _replica_lost(self, event: ReplicaLost) -> None:
        replica = self._table.replicas.get(event.replica)
        if replica is not None:
            self._failures.fail_replica(replica, event.cause)

    def _done(self, event: BatchDone) -> None:
        attempt = self._take_returned(event)
        if attempt is None:
            return
        batch = attempt.batch
        attempt.replica.unmatched_failures = 0
        self._settle_hedge(attempt)
        if batch.failed_on is not None:
            self._count_failure_of(batch.failed_on)
        batch.path.append(attempt.replica.id)
        if batch.stage + 1 == self.config.num_stages:
            self._lifecycle.answer(batch, attempt.replica)
        else:
            batch.advance(self._step.now_s)
            self._step.actions.append(KeepOutput(batch.id, attempt.replica.id, batch.stage))
            self._lifecycle.enqueue(batch, "first", at_head=False)

    def _failed(self, event: BatchFailed) -> None:
        attempt = self._take_returned(event)
        if attempt is None:
            return
        batch = attempt.batch
        if self._failures.other_attempt_remains(attempt):
            batch.retried = True
        elif batch.isolated:
            what = (
                f"stage {batch.stage} raised" if event.sent else f"the batch could not be sent to stage {batch.stage}"
            )
            self._lifecycle.refuse_all(batch, "stage_error", f"{what}: {event.error}")
        elif not event.sent or batch.retried or not batch.pool.has_other(attempt.replica):
            self._lifecycle.isolate(batch)
        else:
            batch.retried = True
            batch.failed_on = attempt.replica
            batch.runnable_since_s = self._step.now_s
            self._lifecycle.enqueue(batch, "retry", at_head=False)

    def _take_returned(self, event: BatchDone | BatchFailed) -> Attempt | None:
        """Free the attempt's place in the replica's window. Returns the attempt, or None if it was abandoned or is unknown."""
        replica = self._table.replicas.get(event.replica)
        attempt = replica.in_flight.get(event.batch) if replica else None
        if replica is None or attempt is None:
            return None
        worked_s = self._table.record_returned(attempt, self._step.now_s)
        self._hedging.unwatch(attempt)
        if isinstance(event, BatchDone):
            self._service_times.observe(attempt, worked_s, event.computed_s, event.transfer_s)
        self._dispatcher.mark_dirty(replica.pool)
        self._failures.release_if_drained(replica)
        return attempt if attempt.detach() else None

    def _count_failure_of(self, replica: Replica) -> None:
        """Count a failure of this replica: the batch on which it raised has succeeded elsewhere."""
        replica.unmatched_failures += 1
        if replica.unmatched_failures >= _MAX_UNMATCHED_FAILURES and self._table.replicas.get(replica.id) is replica:
            self._step.actions.append(FailReplica(replica.id, "error"))
            self._failures.fail_replica(replica, "error")

    def _settle_hedge(self, winner: Attempt) -> None:
        """Abandon the other attempt of the batch, if there is one, and count the outcome."""
        if winner.kind == "hedge":
            self.counters.hedges["won"] += 1
        self._lifecycle.abandon_attempts(winner.batch, hedges="lost")

    # -- timers --------------------------------------------------------------------------------------------------------------

    def _expire_deadlines(self) -> None:
        while (request := self._backlog.deadlines.pop_until(self._step.now_s)) is not None:
            self._lifecycle.refuse(request, "deadline", f"no answer after {self._step.now_s - request.arrived_s:.3f} s")

    def _fail_silent_replicas(self) -> None:
        while (replica := self._table.hang_deadlines.pop_until(self._step.now_s)) is not None:
            self.counters.hangs += 1
            self._step.actions.append(FailReplica(replica.id, "hang"))
            self._failures.fail_replica(replica, "hang")

    def _expire_graces(self) -> None:
        while (pool := self._table.grace_deadlines.pop_until(self._step.now_s)) is not None:
            pool.expired = True
            for batch in pool.batches():
                self._lifecycle.refuse_all(batch, "no_replica", self._lost_detail(pool.stage))
        if self.open_requests and self._table.unavailable:
            for request in (*self._backlog.waiting.values(), *self._backlog.isolated.values()):
                self._lifecycle.refuse(request, "no_replica", self._lost_detail())

    def _lost_detail(self, stage: int | None = None) -> str:
        where = "a stage" if stage is None else f"stage {stage}"
        return f"{where} has had no replica for more than {self.config.recovery_grace_s:g} s"
