"""What the parts of the scheduler share: open requests, replicas, estimates, counters, and the event being handled."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from multiworld_serving.server.scheduling.actions import Action
from multiworld_serving.server.scheduling.batches import Attempt, Pool, Replica, Request, VersionPipeline
from multiworld_serving.server.scheduling.config import FAST_BATCH_S, SchedulerConfig
from multiworld_serving.server.scheduling.estimates.capacity import ArrivalRate
from multiworld_serving.server.scheduling.estimates.hedging import Hedging
from multiworld_serving.server.scheduling.estimates.service_times import ServiceTimes
from multiworld_serving.server.scheduling.events import ReplicaId, RequestId
from multiworld_serving.server.scheduling.priority_map import PriorityMap


class SchedulerState:
    """The state of one scheduler. Its parts (dispatcher, batch lifecycle, …) have no state of their own.

    Attributes:
        now_s: time of the event being handled.
        actions: the actions decided for this event so far.
        draining: partial batches are sent at once, because the server is stopping.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.now_s = float("-inf")
        self.actions: list[Action] = []
        self.counters = Counters()
        self.backlog = Backlog(config.slow_batch_size or config.max_batch_size)
        self.table = ReplicaTable(config)
        self.service_times = ServiceTimes()
        self.arrivals = ArrivalRate()
        self.hedging = Hedging(config, self.service_times)
        self.draining = False

    def min_time_s(self, rows: int) -> float:
        """Lower bound of the time to answer so many rows, by the slowest stage; 0 while the time of a full batch is not known."""
        full, slowest_s = self.backlog.max_rows, 0.0
        for pool in self.table.current.pools if self.table.current is not None else ():
            time_s = self.service_times.full_batch_s(pool.stage, full)
            if time_s is None:
                return 0.0
            slowest_s = max(slowest_s, time_s / len(pool.accepting))
        return rows * slowest_s / full

    def fit_batch_size(self) -> None:
        """Let batches grow as far as the slowest stage computes them in `FAST_BATCH_S`, by its latest times."""
        least, most, rows = self.config.slow_batch_size, self.config.max_batch_size, self.backlog.max_rows
        if least is None or least == most:
            return
        times = [self.service_times.compute_s(stage, rows) for stage in range(self.config.num_stages)]
        known = [time_s for time_s in times if time_s is not None]
        if len(known) == len(times) and (slowest_s := max(known)) > 0:
            self.backlog.limit_rows(max(least, min(most, int(FAST_BATCH_S / slowest_s * rows))))


@dataclass(slots=True)
class Counters:
    """Totals since the start, which are exported as metrics."""

    reroutes: Counter[int] = field(default_factory=Counter)
    """Batches sent again because their replica was lost, by stage."""
    retries: Counter[int] = field(default_factory=Counter)
    """Batches sent again because the stage raised, by stage."""
    hedges: Counter[str] = field(default_factory=Counter)
    """By outcome: "won" (the hedge returned first), "lost" (the first attempt returned first), "wasted" (the hedge's replica
    was lost, its stage raised, or all requests of the batch were closed)."""


class Backlog:
    """All open requests. Each one is in `waiting`, in `isolated` or in a batch.

    `waiting` is the FIFO queue from which batches are formed, each from requests with one key. `isolated` holds the suspect requests,
    which are sent alone.

    Attributes:
        max_rows: of a batch.
    """

    def __init__(self, max_rows: int) -> None:
        self.requests: dict[RequestId, Request] = {}
        self.waiting: OrderedDict[RequestId, Request] = OrderedDict()
        self.isolated: OrderedDict[RequestId, Request] = OrderedDict()
        self.deadlines: PriorityMap[Request, float] = PriorityMap()
        self.max_rows = max_rows
        self._by_key: dict[str, OrderedDict[RequestId, Request]] = {}
        """The waiting requests by key, in the same order. No value is empty."""
        self._full: dict[str, None] = {}
        """Keys whose requests fill a batch, in the order in which they became full."""

    def admit(self, request: Request) -> None:
        """Add a new request at the end of the queue."""
        self.requests[request.id] = request
        self._wait(request)
        self.deadlines.set(request, request.deadline_s)

    def limit_rows(self, max_rows: int) -> None:
        """Set the maximum rows of a batch."""
        if max_rows != self.max_rows:
            self.max_rows = max_rows
            self._full = {key: None for key, members in self._by_key.items() if len(members) >= max_rows}

    def oldest(self) -> Request | None:
        """The head of the queue."""
        return next(iter(self.waiting.values()), None)

    @property
    def first_full(self) -> str | None:
        """The key that has filled a batch for the longest time; None if no key does."""
        return next(iter(self._full), None)

    def is_full(self, key: str) -> bool:
        """Whether the requests with this key fill a batch."""
        return key in self._full

    def take(self, key: str) -> tuple[Request, ...]:
        """Remove the next requests with this key from the queue, as many as fit into a batch."""
        members = self._by_key[key]
        taken = tuple(islice(members.values(), self.max_rows))
        for request in taken:
            del members[request.id], self.waiting[request.id]
        self._removed(key, members)
        return taken

    def take_isolated(self) -> tuple[Request, ...]:
        """Remove the next suspect request."""
        return (self.isolated.popitem(last=False)[1],)

    def requeue(self, request: Request) -> None:
        """Take the request out of its batch and put it at the head of its queue. It starts again at the first stage."""
        request.batch = None
        if request.isolated:
            self.isolated[request.id] = request
            self.isolated.move_to_end(request.id, last=False)
        else:
            self._wait(request)
            self.waiting.move_to_end(request.id, last=False)
            self._by_key[request.key].move_to_end(request.id, last=False)

    def isolate(self, request: Request) -> None:
        """Take the request out of its batch. It starts again at the first stage, alone."""
        request.batch = None
        request.isolated = True
        self.isolated[request.id] = request

    def close(self, request: Request) -> None:
        """Remove a request that is answered, rejected or cancelled."""
        del self.requests[request.id]
        self.deadlines.discard(request)
        self.isolated.pop(request.id, None)
        if self.waiting.pop(request.id, None) is not None:
            members = self._by_key[request.key]
            del members[request.id]
            self._removed(request.key, members)

    def _wait(self, request: Request) -> None:
        """Add the request at the end of `waiting` and of its key."""
        key = request.key
        self.waiting[request.id] = request
        members = self._by_key.get(key)
        if members is None:
            members = self._by_key[key] = OrderedDict()
        members[request.id] = request
        if len(members) >= self.max_rows:
            self._full[key] = None

    def _removed(self, key: str, members: OrderedDict[RequestId, Request]) -> None:
        """Requests with this key were removed."""
        if len(members) < self.max_rows:
            self._full.pop(key, None)
        if not members:
            del self._by_key[key]


class ReplicaTable:
    """Tracks the replicas. Does not decide about batches.

    The current version is the newest version with a replica for every stage. A version without replicas is removed when another
    version is current.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.replicas: dict[ReplicaId, Replica] = {}
        self.draining: dict[ReplicaId, Replica] = {}
        """Those that get no new batches."""
        self.pipelines: dict[str, VersionPipeline] = {}
        """By version, oldest first."""
        self.current: VersionPipeline | None = None
        self.was_complete = False
        self.hang_deadlines: PriorityMap[Replica, float] = PriorityMap()
        """Replicas with batches in flight, by the time at which they count as hung."""
        self.grace_deadlines: PriorityMap[Pool, float] = PriorityMap()
        """Pools without a replica, by the time at which `recovery_grace_s` ends."""

    @property
    def entry_pool(self) -> Pool | None:
        """The pool to which new batches are sent: stage 0 of the current version."""
        return self.current.pools[0] if self.current else None

    @property
    def unavailable(self) -> bool:
        """No version is complete, and none can still become complete within `recovery_grace_s`."""
        return self.current is None and all(pipeline.expired for pipeline in self.pipelines.values())

    def no_replica_detail(self, stage: int | None = None) -> str:
        """Explains the rejection of requests for a stage (None: any stage) that has lost its replicas."""
        where = "a stage" if stage is None else f"stage {stage}"
        return f"{where} has had no replica for more than {self._config.recovery_grace_s:g} s"

    def add(self, replica_id: ReplicaId, stage: int, version: str, now_s: float) -> None:
        """A replica is ready."""
        pool = self._pipeline(version, now_s).pools[stage]
        replica = Replica(replica_id, pool)
        self.replicas[replica_id] = replica
        pool.pipeline.num_replicas += 1
        pool.accepting[replica_id] = replica
        pool.update_availability(replica)
        pool.expired = False
        self.grace_deadlines.discard(pool)
        self._choose_version()

    def stop_accepting(self, replica: Replica, now_s: float) -> None:
        """Send no new batches to this replica. Batches in flight there continue."""
        pool = replica.pool
        if replica.id not in pool.accepting:
            return
        pool.stop_accepting(replica)
        if not pool.accepting:
            self.grace_deadlines.set(pool, now_s + self._config.recovery_grace_s)
        self._choose_version()

    def remove(self, replica: Replica, now_s: float) -> None:
        """Remove a replica. Its batches in flight will not return."""
        self.stop_accepting(replica, now_s)
        self.hang_deadlines.discard(replica)
        self.draining.pop(replica.id, None)
        del self.replicas[replica.id]
        replica.pool.pipeline.num_replicas -= 1

    def record_sent(self, attempt: Attempt) -> None:
        """Record that a batch was sent, and start the hang timer if it is the only one in flight."""
        attempt.replica.pool.add_attempt(attempt)
        if len(attempt.replica.in_flight) == 1:
            self._start_hang_timer(attempt.replica, attempt.sent_s)

    def record_returned(self, attempt: Attempt, now_s: float) -> float:
        """Record that the replica returned a batch, and restart the hang timer.

        Returns:
            The service time in seconds: since the batch was sent or, if later, since the replica's previous return.
        """
        replica = attempt.replica
        replica.pool.remove_attempt(attempt)
        worked_s = now_s - max(attempt.sent_s, replica.answered_s)
        replica.answered_s = now_s
        if replica.in_flight:
            self._start_hang_timer(replica, now_s)
        else:
            self.hang_deadlines.discard(replica)
        return worked_s

    def _start_hang_timer(self, replica: Replica, now_s: float) -> None:
        self.hang_deadlines.set(replica, now_s + self._config.hang_timeout_s)

    def drop_unused_versions(self) -> None:
        """Remove the versions without replicas if another one is current. Their queues must be empty."""
        if self.current is None:
            return
        for pipeline in [each for each in self.pipelines.values() if not each.num_replicas]:
            del self.pipelines[pipeline.version]
            for pool in pipeline.pools:
                self.grace_deadlines.discard(pool)

    def _pipeline(self, version: str, now_s: float) -> VersionPipeline:
        pipeline = self.pipelines.get(version)
        if pipeline is None:
            pipeline = self.pipelines[version] = VersionPipeline(version, self._config.num_stages, self._config.window)
            for pool in pipeline.pools:
                self.grace_deadlines.set(pool, now_s + self._config.recovery_grace_s)
        return pipeline

    def _choose_version(self) -> None:
        self.current = next((each for each in reversed(self.pipelines.values()) if each.complete), None)
        self.was_complete = self.was_complete or self.current is not None
