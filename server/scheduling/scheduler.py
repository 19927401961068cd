"""The scheduler: forms batches from requests, assigns batches to replicas, and handles failures.

It is pure: no I/O, no clock, no randomness, no tasks. The same code runs in production and in the simulation.

    scheduler = Scheduler(SchedulerConfig(num_stages=2))
    for action in scheduler.handle(ReplicaReady("s0.r0#1@2", stage=0, version="v1"), now_s=time.monotonic()):
        perform(action)
    wake_at(scheduler.next_wakeup_s())  # then handle(Tick(), now_s)

The rules:

- Every accepted request gets exactly one `Answer` row or `Reject`, by its deadline at the latest, unless it is cancelled.
- A batch is formed from requests with equal keys, in the order of arrival, when it is full or its oldest request has waited
  `batch_timeout_s`. If the request at the head of the queue has waited that long, its key goes next, before other keys that fill a batch:
  a rare key does not starve. With `adaptive_batching` a partial batch is sent at once to a replica of stage 0 that has nothing in
  flight; while all replicas are busy, it waits until one is about to become idle, estimated from recent service times.
- A batch has at most `slow_batch_size` rows, and up to `max_batch_size` while each stage computes that many in `FAST_BATCH_S`.
- A batch is formed only when a replica of stage 0 has room and no later stage is saturated. Until then requests stay in the queue, and
  batches become larger. A batch keeps the model version that it began with.
- A batch goes to the replica with the fewest rows in flight. A replica has at most `window` batches in flight.
- A batch in flight on a lost replica is rerouted: it goes to the head of its stage's queue, with the input that the driver stored. After
  `max_attempts - 1` broken worlds its requests are isolated: each starts again, alone in its batch and alone on its replica. A request
  that breaks a world alone is rejected as poison. A replica that was draining, or was lost with cause "left", does not count.
- A batch whose stage raised is retried once, on another replica. Then its requests are isolated; a request whose stage raises again
  is rejected as stage_error. A batch that the driver failed to send is isolated at once, and so is one whose input the model does not
  take, such as an index out of range. A request that fails so alone is rejected as invalid_input, without another attempt.
- Work for a stage without replicas waits `recovery_grace_s`, counted from when the stage lost its last replica. Then it is rejected, and
  so are new requests until the stage has a replica. Requests whose version lost a stage are requeued: they start again under
  another complete version.
- A late batch is hedged: it is sent to a second replica, and the first output wins. It goes before all others as soon as a replica has
  room. If the hedge is late too, the replica that keeps their input may be frozen: the requests of the batch are requeued.
- An output may stay at its replica (`BatchDone.kept`). It is lost with the replica, or when another replica cannot get it (`InputLost`,
  which blames nobody). A lost input is never sent again: its requests are requeued, unless an attempt in flight succeeds before it is
  late. A draining replica is released when it keeps no input.
- A replica with batches in flight that returns none for `hang_timeout_s` is failed. So is a replica that raised on several consecutive
  batches which then succeeded elsewhere.
- A request that cannot be answered by its deadline, by the time that full batches take, is rejected on arrival: see `admission.py`.
- Late events (about a removed replica or an answered batch) have no effect.

An event costs O(log n) in the number of replicas and open requests.
"""

from __future__ import annotations

from multiworld_serving.server.scheduling.actions import Action, FailReplica
from multiworld_serving.server.scheduling.admission import rejection
from multiworld_serving.server.scheduling.batch_lifecycle import BatchLifecycle
from multiworld_serving.server.scheduling.batches import Request
from multiworld_serving.server.scheduling.config import SchedulerConfig
from multiworld_serving.server.scheduling.dispatcher import Dispatcher
from multiworld_serving.server.scheduling.estimates.capacity import replicas_wanted
from multiworld_serving.server.scheduling.events import (
    BatchDone,
    BatchFailed,
    Drain,
    Events,
    InputLost,
    ReplicaDraining,
    ReplicaId,
    ReplicaLost,
    ReplicaReady,
    RequestArrived,
    RequestCancelled,
    Tick,
)
from multiworld_serving.server.scheduling.returns import Returns
from multiworld_serving.server.scheduling.state import SchedulerState


class Scheduler:
    """Event in, actions out. The rules are in the docstring of the module."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._state = SchedulerState(config)
        self.counters = self._state.counters
        self._lifecycle = BatchLifecycle(self._state)
        self._dispatcher = Dispatcher(self._state, self._lifecycle)
        self._returns = Returns(self._state, self._lifecycle)

    # -- called by the driver ------------------------------------------------------------------------------------------------

    def handle(self, event: Events, now_s: float) -> list[Action]:
        """Handle one event, or requests that arrive together. Returns the actions to perform, in order, before the next event is handled.

        Args:
            now_s: monotonic time of the event. A time before that of the previous event counts as equal to it.
        Raises:
            ValueError: the event is invalid (unknown stage, or a request id that is still open).
        """
        self._state.now_s = max(now_s, self._state.now_s)
        self._state.actions = []
        self._apply(event)
        self._expire_deadlines()
        self._fail_hung_replicas()
        self._expire_graces()
        self._lifecycle.release_drained()
        self._dispatcher.find_late()
        self._dispatcher.dispatch()
        return self._state.actions

    def next_wakeup_s(self) -> float | None:
        """When the next `Tick` is due at the latest; None if no timer is set."""
        times = (
            self._state.backlog.deadlines.least(),
            self._state.table.hang_deadlines.least(),
            self._state.table.grace_deadlines.least(),
            self._state.hedging.late.least(),
            self._dispatcher.next_batch_s(),
        )
        return min((time_s for time_s in times if time_s is not None), default=None)

    def replicas_wanted(self, now_s: float) -> tuple[float, ...]:
        """Replicas that each stage needs for the load of this leader, as fractions: see `estimates/capacity.py`."""
        state, entry_pool = self._state, self._state.table.entry_pool
        usual = state.backlog.max_rows * (len(entry_pool.accepting) if entry_pool else 0)
        backlog = max(0, len(state.backlog.waiting) - usual)
        rate_per_s, rows = state.arrivals.per_s(now_s), state.backlog.max_rows
        return replicas_wanted(rate_per_s, backlog, state.service_times, self.config.num_stages, rows)

    # -- statistics, O(number of versions) at most ---------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """A version is complete."""
        return self._state.table.current is not None

    @property
    def current_version(self) -> str | None:
        """The version of new batches."""
        return self._state.table.current.version if self._state.table.current else None

    @property
    def queue_depth(self) -> int:
        """Requests that wait for a batch, including isolated requests."""
        return len(self._state.backlog.waiting) + len(self._state.backlog.isolated)

    @property
    def open_requests(self) -> int:
        """Accepted requests that are not closed. After `Drain`, zero means that all work is done."""
        return len(self._state.backlog.requests)

    def in_flight(self, replica: ReplicaId) -> int:
        """Batches in flight on this replica; 0 for an unknown replica."""
        known = self._state.table.replicas.get(replica)
        return len(known.in_flight) if known else 0

    def batches_of(self, version: str) -> int:
        """Batches of this version that have not ended. The version is in use while there are any."""
        pipeline = self._state.table.pipelines.get(version)
        return pipeline.num_batches if pipeline else 0

    # -- events --------------------------------------------------------------------------------------------------------------

    def _apply(self, event: Events) -> None:
        match event:
            case list():
                for arrived in event:
                    self._arrived(arrived)
            case RequestArrived():
                self._arrived(event)
            case BatchDone() | BatchFailed() | InputLost():
                self._returns.handle(event)
            case RequestCancelled():
                self._cancelled(event)
            case ReplicaReady():
                self._replica_ready(event)
            case ReplicaDraining():
                self._replica_draining(event)
            case ReplicaLost():
                self._replica_lost(event)
            case Drain():
                self._state.draining = True
            case Tick():
                pass

    def _arrived(self, event: RequestArrived) -> None:
        backlog, now_s, ids = self._state.backlog, self._state.now_s, range(event.request, event.request + event.rows)
        if open_ids := [each for each in ids if each in backlog.requests]:
            raise ValueError(f"request {open_ids[0]} is still open")
        for _ in ids:
            self._state.arrivals.arrived(now_s)
        if (rejected := rejection(event, self._state)) is None:
            for each in ids:
                backlog.admit(Request(each, event.deadline_s, now_s, now_s, event.key))
        else:
            self._state.actions.append(rejected)

    def _cancelled(self, event: RequestCancelled) -> None:
        request = self._state.backlog.requests.get(event.request)
        if request is not None:
            self._lifecycle.close(request)

    def _replica_ready(self, event: ReplicaReady) -> None:
        if not 0 <= event.stage < self.config.num_stages:
            raise ValueError(f"replica {event.replica} is for stage {event.stage} of {self.config.num_stages}")
        if event.replica not in self._state.table.replicas:
            self._state.table.add(event.replica, event.stage, event.version, self._state.now_s)
            self._lifecycle.replicas_changed()

    def _replica_draining(self, event: ReplicaDraining) -> None:
        table = self._state.table
        replica = table.replicas.get(event.replica)
        if replica is not None and replica.id not in table.draining:
            table.draining[replica.id] = replica
            table.stop_accepting(replica, self._state.now_s)
            self._lifecycle.replicas_changed()

    def _replica_lost(self, event: ReplicaLost) -> None:
        replica = self._state.table.replicas.get(event.replica)
        if replica is not None:
            self._lifecycle.fail_replica(replica, event.cause)

    # -- timers --------------------------------------------------------------------------------------------------------------

    def _expire_deadlines(self) -> None:
        while (request := self._state.backlog.deadlines.pop_until(self._state.now_s)) is not None:
            waited_s = self._state.now_s - request.arrived_s
            self._lifecycle.reject(request, "deadline", f"no answer after {waited_s:.3f} s")

    def _fail_hung_replicas(self) -> None:
        while (replica := self._state.table.hang_deadlines.pop_until(self._state.now_s)) is not None:
            self._state.actions.append(FailReplica(replica.id, "hang"))
            self._lifecycle.fail_replica(replica, "hang")

    def _expire_graces(self) -> None:
        while (pool := self._state.table.grace_deadlines.pop_until(self._state.now_s)) is not None:
            pool.expired = True
            for batch in pool.batches():
                self._lifecycle.reject_all(batch, "no_replica", self._state.table.no_replica_detail(pool.stage))
        if self.open_requests and self._state.table.unavailable:
            for request in (*self._state.backlog.waiting.values(), *self._state.backlog.isolated.values()):
                self._lifecycle.reject(request, "no_replica", self._state.table.no_replica_detail())
