"""The state of the scheduler, and the steps that change it: batches wait, are answered, rejected, isolated, requeued and rerouted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from multiworld_serving.server.leader.scheduling.actions import (
    Action,
    Answer,
    FreeBatch,
    Reason,
    Reject,
    ReleaseReplica,
    SendKind,
)
from multiworld_serving.server.leader.scheduling.backlog import Backlog
from multiworld_serving.server.leader.scheduling.batches import Attempt, Batch, Pool, Replica, Request
from multiworld_serving.server.leader.scheduling.config import FAST_BATCH_S, SchedulerConfig
from multiworld_serving.server.leader.scheduling.estimates.capacity import ArrivalRate
from multiworld_serving.server.leader.scheduling.estimates.service_times import Hedging, ServiceTimes
from multiworld_serving.server.leader.scheduling.events import ReplicaId, RequestId
from multiworld_serving.server.leader.scheduling.replica_table import ReplicaTable

_MAX_HOLD_S = 0.02
"""Longest hold of `hold_steps`. Frontends send the next steps of generated texts sooner; a slow stage must not delay other sessions."""


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


class SchedulerState:
    """The open requests, batches and replicas of one scheduler. Each step keeps the backlog and the queues consistent.

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
        self.next_batch_s: float | None = None
        """When the oldest waiting request is due; None if it waits for something other than time."""
        self._compute_s: dict[int, float] = {}
        """Of a batch of the maximum size, by stage."""
        self._row_s: float | None = None
        """See `min_time_s`; None: a batch has returned or the replicas have changed since it was known."""
        self.steps: dict[tuple[ReplicaId, ...], dict[RequestId, Request]] = {}
        """The requests of sessions that wait for a batch, by their route. No value is empty."""
        self._step_holds: dict[tuple[ReplicaId, ...], tuple[float, int]] = {}
        """Until when steps of a route are not sent, unless there are so many of them."""

    def min_time_s(self, rows: int) -> float:
        """Lower bound of the time to answer so many rows, by the slowest stage; 0 while the time of a full batch is not known."""
        if self._row_s is None:
            full, pools = self.backlog.max_rows, () if self.table.current is None else self.table.current.pools
            times = [(self.service_times.full_batch_s(pool.stage, full), pool) for pool in pools]
            known = [time_s / len(pool.accepting) for time_s, pool in times if time_s is not None]
            self._row_s = max(known, default=0.0) / full if len(known) == len(times) else 0.0
        return rows * self._row_s

    def observed(self, stage: int) -> None:
        """A batch has returned from this stage: let batches grow as far as the slowest stage computes them in `FAST_BATCH_S`."""
        self._row_s = None
        least, most, rows = self.config.slow_batch_size, self.config.max_batch_size, self.backlog.max_rows
        if least is None or least == most:
            return
        times, num_stages = self._compute_s, self.config.num_stages
        for each in (stage,) if len(times) == num_stages else range(num_stages):
            if (time_s := self.service_times.compute_s(each, rows)) is None:
                return
            times[each] = time_s
        if (slowest_s := max(times.values())) > 0:
            self.backlog.limit_rows(max(least, min(most, int(FAST_BATCH_S / slowest_s * rows))))
            if self.backlog.max_rows != rows:
                times.clear()

    # -- statistics, O(number of versions) at most ---------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """A version is complete."""
        return self.table.current is not None

    @property
    def current_version(self) -> str | None:
        """The version of new batches."""
        return self.table.current.version if self.table.current else None

    @property
    def queue_depth(self) -> int:
        """Requests that wait for a batch, including isolated requests."""
        return len(self.backlog.waiting) + len(self.backlog.isolated)

    @property
    def open_requests(self) -> int:
        """Accepted requests that are not closed. After `Drain`, zero means that all work is done."""
        return len(self.backlog.requests)

    def in_flight(self, replica: ReplicaId) -> int:
        """Batches in flight on this replica; 0 for an unknown replica."""
        known = self.table.replicas.get(replica)
        return len(known.in_flight) if known else 0

    def batches_of(self, version: str) -> int:
        """Batches of this version that have not ended. The version is in use while there are any."""
        pipeline = self.table.pipelines.get(version)
        return pipeline.num_batches if pipeline else 0

    # -- when the next batch is formed, and from which requests ---------------------------------------------------------------

    def key_due(self, oldest: Request, due_s: float) -> str | None:
        """The key of the next batch, if the oldest waiting request is due then; None if no batch is due."""
        if self.draining or self.now_s >= due_s or self.backlog.is_full(oldest.key):
            return oldest.key
        return self.backlog.first_full

    def due_s(self, oldest: Request, replica: Replica) -> float:
        """When to send a partial batch. Waiting costs nothing until the replica is about to become idle."""
        due_s = oldest.arrived_s + self.config.batch_timeout_s
        if not self.config.adaptive_batching:
            return due_s
        next_send_s = self.service_times.next_send_s(replica)
        if not replica.in_flight:
            return oldest.arrived_s if next_send_s is None else max(oldest.arrived_s, next_send_s)
        return due_s if next_send_s is None else max(due_s, next_send_s - self.config.batch_timeout_s)

    # -- steps of batches and requests ---------------------------------------------------------------------------------------

    def enqueue(self, batch: Batch, kind: SendKind, *, at_head: bool) -> None:
        """Put the batch into the queue of its stage. Requeue or reject its requests if they cannot be sent to that stage again."""
        batch.kind = kind
        pool = batch.pool
        if batch.route and not self.is_open(batch.route):
            self.lose_sessions(batch)
        elif not pool.accepting and self.table.current is not None:
            self.requeue(batch)
        elif pool.expired:
            self.reject_all(batch, "no_replica", self.table.no_replica_detail(batch.stage))
        else:
            pool.enqueue(batch, at_head=at_head)

    def is_open(self, route: tuple[ReplicaId, ...]) -> bool:
        """Whether the replicas of a route, which are those of the last stages, accept batches."""
        first = self.config.num_stages - len(route)
        kept = [(stage, self.table.replicas.get(each)) for stage, each in enumerate(route, first)]
        return all(each and each.pool.stage == stage and each.id in each.pool.accepting for stage, each in kept)

    def hold_steps(self, attempt: Attempt) -> None:
        """Hold the waiting steps of a route until the sessions of a finished batch send their next steps, so that one batch has all.

        The hold lasts half the duration of that batch, and at most `_MAX_HOLD_S`.
        """
        route, now_s = attempt.batch.route, self.now_s
        self._step_holds = {each: hold for each, hold in self._step_holds.items() if hold[0] > now_s}
        if route:
            expected = len(attempt.batch.rows) + len(self.steps.get(route, ()))
            until_s = now_s + min((now_s - attempt.sent_s) / 2, _MAX_HOLD_S)
            self._step_holds[route] = until_s, min(expected, self.config.max_batch_size)

    def are_held(self, route: tuple[ReplicaId, ...], replica: Replica) -> bool:
        """Whether the steps of a route wait for others, so that one batch has them all. The replica is the first of the route."""
        if any(each.batch.route == route for each in replica.in_flight.values()):
            return True
        until_s, expected = self._step_holds.get(route, (self.now_s, 0))
        if self.now_s >= until_s or len(self.steps[route]) >= expected:
            self._step_holds.pop(route, None)
            return False
        self.next_batch_s = until_s if self.next_batch_s is None else min(until_s, self.next_batch_s)
        return True

    def lose_sessions(self, batch: Batch) -> None:
        """Reject the requests of a batch whose sessions are lost, or may be incomplete. Their frontends begin new ones."""
        self.reject_all(batch, "session_lost", "a replica that kept the session is gone")

    def requeue(self, batch: Batch) -> None:
        """Return the requests to the head of the backlog: they start again at the first stage."""
        if batch.route:
            self.lose_sessions(batch)
            return
        requests = [request for _, request in batch.open_requests()]
        for request in reversed(requests):
            request.attempt = batch.attempt + 1
            self.backlog.requeue(request)
        self._free(batch)

    def restart(self, batch: Batch) -> None:
        """Requeue the requests, and abandon the attempts in flight: the replica that keeps their input is lost, or may be frozen."""
        batch.pool.dequeue(batch)
        self.abandon_attempts(batch, hedges="wasted")
        self.requeue(batch)

    def isolate(self, batch: Batch, *, parts: int | None = None) -> None:
        """Dissolve the batch into so many parts, by default one for each request. Each part starts again at the first stage, alone."""
        if batch.route:
            self.lose_sessions(batch)
            return
        requests = [request for _, request in batch.open_requests()]
        parts = parts or len(requests)
        for number, request in enumerate(requests):
            request.attempt = batch.attempt + 1
            request.runnable_since_s = self.now_s
            self.backlog.isolate(request, (batch.id, number * parts // len(requests)))
        self._free(batch)

    def answer(self, batch: Batch, replica: Replica) -> None:
        """Answer the open requests with the output of the last stage."""
        open_requests = list(batch.open_requests())
        rows = tuple((request.id, row) for row, request in open_requests)
        self.actions.append(Answer(batch.id, replica.id, rows, batch.pipeline.version, batch.attempt))
        for _, request in open_requests:
            self.backlog.close(request)
            request.batch = None  # break the reference cycle, so that no garbage collection is needed
        self._free(batch)

    def reject_all(self, batch: Batch, reason: Reason, detail: str) -> None:
        """Reject every open request of the batch."""
        for _, request in list(batch.open_requests()):
            self.reject(request, reason, detail)

    def reject(self, request: Request, reason: Reason, detail: str) -> None:
        """Reject an open request."""
        self.actions.append(Reject(request.id, reason, detail))
        self.close(request)

    def close(self, request: Request) -> None:
        """Close a request. Closing the last open request of a batch ends the batch."""
        self.backlog.close(request)
        if (members := self.steps.get(request.route)) is not None and members.pop(request.id, request) and not members:
            del self.steps[request.route]
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
            self.hedging.forget(attempt)
            if attempt.kind == "hedge":
                self.counters.hedges[hedges] += 1
        batch.in_flight.clear()

    def fail_replica(self, replica: Replica, cause: str) -> None:
        """Remove a replica and recover its batches.

        A batch in flight returns to the head of its stage's queue. If its requests have broken too many worlds, they are isolated or
        rejected. Batches whose input it kept start again.
        """
        blame = cause != "left" and replica.id not in self.table.draining
        self.table.remove(replica, self.now_s)
        self.hedging.refund(replica)
        self.replicas_changed()
        lost = reversed(replica.in_flight.values())
        suspects = [attempt.batch for attempt in lost if attempt.detach() and self._attempt_lost(attempt, blame=blame)]
        for batch in reversed(suspects):
            self.isolate(batch)
        for batch in reversed(list(replica.held.values())):
            self.restart(batch)

    def release_drained(self) -> None:
        """Release the draining replicas that have no batches in flight and keep no input.

        Batches whose input a draining replica keeps start again if their stage has no replica: the worker may leave to serve that stage.
        """
        table = self.table
        for replica in table.draining.values():
            for batch in reversed(list(replica.held.values())):
                if not batch.pool.accepting and not batch.in_flight:
                    self.restart(batch)
        for replica in [each for each in table.draining.values() if not each.in_flight and not each.held]:
            table.remove(replica, self.now_s)
            self.replicas_changed()
            self.actions.append(ReleaseReplica(replica.id))

    def attempt_failed(self, attempt: Attempt, *, suspect: bool = False) -> None:
        """Count a failed hedge, and let the batch's other attempt, if there is one, be hedged in turn.

        Suspects are not hedged: each further hedge could break another world.
        """
        if attempt.kind == "hedge":
            self.counters.hedges["wasted"] += 1
        if not suspect:
            for other in attempt.batch.in_flight.values():
                self.hedging.watch(other, self.now_s)

    def replicas_changed(self) -> None:
        """Update queues and versions. Call after replicas were added or removed."""
        self._row_s = None
        for pipeline in self.table.pipelines.values():
            for pool in pipeline.pools:
                self._requeue_stranded(pool)
        self.table.drop_unused_versions()

    def _cancel(self, batch: Batch) -> None:
        batch.pool.dequeue(batch)
        self.abandon_attempts(batch, hedges="wasted")
        self._free(batch)

    def _free(self, batch: Batch) -> None:
        batch.hold_at(None)
        batch.pipeline.num_batches -= 1
        self.actions.append(FreeBatch(batch.id))

    def _attempt_lost(self, attempt: Attempt, *, blame: bool) -> bool:
        """Handle an attempt whose replica was lost. Returns True if its requests must be isolated."""
        batch = attempt.batch
        self.hedging.forget(attempt)
        requests = [request for _, request in batch.open_requests()]
        for request in requests if blame else ():
            request.worlds_broken += 1
        worlds_broken = max((request.worlds_broken for request in requests), default=0)
        suspect = worlds_broken >= self.config.max_attempts - 1
        self.attempt_failed(attempt, suspect=suspect)
        if batch.in_flight:  # a hedge, or the attempt that was hedged
            return False
        if not batch.is_one_suspect and suspect:
            return True
        if batch.is_one_suspect and blame and worlds_broken >= self.config.max_attempts:
            detail = f"it broke {worlds_broken} worlds, the last one alone"
            self.reject_all(batch, "poison", detail)
        else:
            batch.runnable_since_s = self.now_s
            batch.failed_on = None
            self.enqueue(batch, "reroute", at_head=True)
        return False

    def _requeue_stranded(self, pool: Pool) -> None:
        """Move batches that can no longer be sent from this queue: another version is complete, or a retry has no other replica."""
        for batch in [each for each in pool.routed.values() if not self.is_open(each.route)]:
            pool.dequeue(batch)
            self.lose_sessions(batch)
        stranded: list[Batch] = []
        if not pool.accepting and self.table.current is not None:
            stranded = pool.batches()
        elif len(pool.accepting) == 1:
            stranded = [batch for batch in pool.retries.values() if not pool.has_other(batch.failed_on)]
        for batch in reversed(stranded):
            pool.dequeue(batch)
            if pool.accepting:
                self.isolate(batch, parts=2)
            else:
                self.requeue(batch)
