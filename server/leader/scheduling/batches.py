"""The data types of the scheduler: requests, batches, replicas, and the queues of each stage. `scheduler.py` forms the batches.

These types refer to each other: a batch knows its pipeline and its attempts, a replica its pool and its attempts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from multiworld_serving.server.leader.scheduling.actions import SendKind
from multiworld_serving.server.leader.scheduling.events import BatchId, ReplicaId, RequestId
from multiworld_serving.server.leader.scheduling.priority_map import PriorityMap


@dataclass(slots=True, eq=False)
class Request:
    """An accepted request that is neither answered, rejected nor cancelled."""

    id: RequestId
    deadline_s: float
    arrived_s: float
    runnable_since_s: float
    """When it could have been sent: its arrival, or its isolation."""
    key: str = ""
    """See `RequestArrived.key`."""
    route: tuple[ReplicaId, ...] = ()
    """See `RequestArrived.route`."""
    batch: Batch | None = None
    """None while it waits in the backlog."""
    worlds_broken: int = 0
    """Replicas that failed while this request was in flight there; draining replicas and cause `left` do not count."""
    attempt: int = 1
    """See `SendBatch.attempt`."""
    part: tuple[BatchId, int] | None = None
    """The part of a dissolved batch with which it is isolated; None: it is not isolated."""


@dataclass(slots=True, eq=False)
class Attempt:
    """A batch in flight on one replica. Hedging adds a second attempt; the first to return wins.

    An attempt that its batch no longer lists was abandoned: another attempt won, or all requests are closed. It occupies the
    replica's window until the replica returns it.
    """

    batch: Batch
    replica: Replica
    kind: SendKind
    sent_s: float
    hedged: bool = False
    """A hedge was sent because this attempt was late."""

    def detach(self) -> bool:
        """Remove it from its batch. Returns False if it was abandoned before."""
        wanted = self.batch.in_flight.get(self.replica.id) is self
        if wanted:
            del self.batch.in_flight[self.replica.id]
        return wanted


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that pass the stages together, all through one version of the model."""

    id: BatchId
    rows: tuple[Request, ...]
    """Fixed, even when some of the requests are closed meanwhile."""
    pipeline: VersionPipeline
    isolated: bool
    attempt: int
    """See `SendBatch.attempt`."""
    runnable_since_s: float
    """When it could have been sent; see `SendBatch.waited_s`."""
    open_rows: int
    kind: SendKind = "first"
    route: tuple[ReplicaId, ...] = ()
    """See `RequestArrived.route`. Such a batch is never sent a second time: it ends with its replica."""
    stage: int = 0
    in_flight: dict[ReplicaId, Attempt] = field(default_factory=dict)
    failed_on: Replica | None = None
    """Where the current stage raised; the retry goes to another replica."""
    retried: bool = False
    """At its stage. An isolated batch counts as retried: it is halved at its first error."""
    holder: Replica | None = None
    """Keeps the input of the current stage; None if the leader or the frontends have it. Never a removed replica."""

    @property
    def pool(self) -> Pool:
        """The replicas of its current stage."""
        return self.pipeline.pools[self.stage]

    @property
    def is_one_suspect(self) -> bool:
        """Only its request can be the cause if it fails: it is the only one, alone on its replica."""
        return self.isolated and len(self.rows) == 1

    def open_requests(self) -> Iterator[tuple[int, Request]]:
        """(row, request) of the requests that are still open."""
        return ((row, request) for row, request in enumerate(self.rows) if request.batch is self)

    def advance(self, now_s: float) -> None:
        """Move to the next stage and reset the retry state."""
        self.stage += 1
        self.runnable_since_s = now_s
        self.failed_on = None
        self.retried = self.isolated

    def hold_at(self, holder: Replica | None) -> None:
        """Record which replica keeps the input, instead of the previous one."""
        if self.holder is not None:
            del self.holder.held[self.id]
        if holder is not None:
            holder.held[self.id] = self
        self.holder = holder


@dataclass(slots=True, eq=False)
class Replica:
    """One stage of one version on one worker link. It ends with the link; the slot that the link occupies gets a new replica then."""

    id: ReplicaId
    pool: Pool
    in_flight: dict[BatchId, Attempt] = field(default_factory=dict)
    """In the order sent."""
    held: dict[BatchId, Batch] = field(default_factory=dict)
    """Batches whose input this replica keeps: it computed their previous stage."""
    rows: int = 0
    """Rows in flight."""
    unmatched_failures: int = 0
    """Consecutive batches that raised here and succeeded on another replica."""
    answered_s: float = float("-inf")
    """When it returned a batch last."""
    last_used: int = 0


class Pool:
    """The replicas of one stage that run one version, and three queues of batches for them.

    `queue` is served in order. `retries` go first, but not to the replica where they failed. `isolated` batches are sent alone:
    one replica at a time is reserved for them. A reserved replica gets no other batch until it is empty and the isolated batch has
    returned. With a single replica, isolated batches and other batches alternate.
    """

    def __init__(self, pipeline: VersionPipeline, stage: int) -> None:
        self.pipeline = pipeline
        self.stage = stage
        self.accepting: dict[ReplicaId, Replica] = {}
        """Ready and not draining."""
        self.available: PriorityMap[Replica, tuple[int, int]] = PriorityMap()
        """Accepting, with room in the window and not reserved: fewest rows in flight first, then least recently used."""
        self.late: dict[Attempt, None] = {}
        """Late attempts that are not hedged yet."""
        self.queue: OrderedDict[BatchId, Batch] = OrderedDict()
        self.retries: OrderedDict[BatchId, Batch] = OrderedDict()
        self.isolated: OrderedDict[BatchId, Batch] = OrderedDict()
        self.routed: OrderedDict[BatchId, Batch] = OrderedDict()
        """Those that wait for one replica, which keeps their sessions."""
        self.reserved: Replica | None = None
        self.isolated_first = True
        self.expired = False
        """Without a replica for longer than `recovery_grace_s`."""
        self._uses = 0

    @property
    def saturated(self) -> bool:
        """At least one batch waits for each replica: earlier stages should send no more."""
        return len(self.queue) + len(self.retries) >= max(1, len(self.accepting))

    def has_other(self, replica: Replica | None) -> bool:
        """Whether a replica other than this one accepts batches."""
        return any(each is not replica for each in islice(self.accepting.values(), 2))

    def has_room(self, replica: Replica) -> bool:
        """Whether a batch can be sent to this replica now."""
        has_room = len(replica.in_flight) < self.pipeline.window
        return has_room and replica.id in self.accepting and replica is not self.reserved

    def update_availability(self, replica: Replica) -> None:
        """Update the replica's position in `available`. Call after every change of the replica."""
        if self.has_room(replica):
            self.available.set(replica, (replica.rows, replica.last_used))
        else:
            self.available.discard(replica)

    def add_attempt(self, attempt: Attempt) -> None:
        """Record that a batch was sent to one of the replicas."""
        self._uses += 1
        replica = attempt.replica
        replica.in_flight[attempt.batch.id] = attempt
        replica.rows += len(attempt.batch.rows)
        replica.last_used = self._uses
        self.update_availability(replica)

    def remove_attempt(self, attempt: Attempt) -> None:
        """Record that the replica returned the batch, with an output or an error."""
        replica = attempt.replica
        del replica.in_flight[attempt.batch.id]
        replica.rows -= len(attempt.batch.rows)
        if replica is self.reserved and attempt.batch.isolated:
            self.release()
            self.isolated_first = len(self.accepting) > 1 and not self.retries
        self.update_availability(replica)

    def reserve(self) -> Replica | None:
        """The replica reserved for isolated batches; reserves the least loaded available one if there is none yet."""
        if self.reserved is None:
            self.reserved = self.available.first()
            if self.reserved is not None:
                self.update_availability(self.reserved)
        return self.reserved

    def release(self) -> None:
        """End the reservation. Do not call while an isolated batch is in flight on the reserved replica."""
        replica, self.reserved = self.reserved, None
        if replica is not None:
            self.update_availability(replica)

    def stop_accepting(self, replica: Replica) -> None:
        """Send no new batches to this replica."""
        self.accepting.pop(replica.id, None)
        if self.reserved is replica:
            self.reserved = None
        self.available.discard(replica)

    def enqueue(self, batch: Batch, *, at_head: bool) -> None:
        """Put the batch into the queue of its kind."""
        queue = self._queue_for(batch)
        queue[batch.id] = batch
        if at_head:
            queue.move_to_end(batch.id, last=False)

    def dequeue(self, batch: Batch) -> None:
        """Remove the batch from its queue, if it is there."""
        self._queue_for(batch).pop(batch.id, None)

    def batches(self) -> list[Batch]:
        """All batches in the queues, in the order in which they would be sent."""
        return [*self.routed.values(), *self.retries.values(), *self.queue.values(), *self.isolated.values()]

    def _queue_for(self, batch: Batch) -> OrderedDict[BatchId, Batch]:
        if batch.route:
            return self.routed
        if batch.isolated:
            return self.isolated
        return self.queue if batch.failed_on is None else self.retries


class VersionPipeline:
    """One version of the model: a pool of replicas for each stage."""

    def __init__(self, version: str, num_stages: int, window: int) -> None:
        self.version = version
        self.window = window
        self.pools = [Pool(self, stage) for stage in range(num_stages)]
        self.num_replicas = 0
        """Includes draining replicas."""
        self.num_batches = 0
        """Batches that began with this version and have not ended."""

    @property
    def complete(self) -> bool:
        """Every stage has a replica."""
        return all(pool.accepting for pool in self.pools)

    @property
    def expired(self) -> bool:
        """A stage has had no replica for longer than `recovery_grace_s`."""
        return any(pool.expired for pool in self.pools)

    @property
    def saturated(self) -> bool:
        """A later stage is saturated."""
        return any(pool.saturated for pool in self.pools[1:])

    @property
    def isolation_saturated(self) -> bool:
        """An isolated batch waits at a later stage."""
        return any(pool.isolated for pool in self.pools[1:])
