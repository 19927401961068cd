"""The scheduler: which request travels in which batch over which link, and what becomes of it when something breaks.

It is pure: no I/O, no clock, no randomness, no task. The same code serves in production and under simulation.

    scheduler = Scheduler(SchedulerConfig(num_stages=2))
    for action in scheduler.handle(LinkReady("s0r0#1", stage=0, version="v1"), now_s=time.monotonic()):
        perform(action)
    wake_at(scheduler.next_wakeup_s())  # then handle(Tick(), now_s)

The rules:

- Every accepted request gets exactly one `Answer` row or `Refuse`, at its deadline at the latest, unless it is cancelled.
- A batch is formed from the head of the queue when it is full or its oldest request has waited `batch_timeout_s`. With
  `adaptive_batching` it goes at once to a replica of stage 0 that has nothing in flight: a lone request does not wait. While all
  are busy, it waits until one is nearly free, going by what such work took lately: the busier they are, the fuller the batches.
  But only when a replica of stage 0 has room and no later stage has enough waiting already. Until then requests stay in the queue and
  batches get fuller. A batch keeps the version of the model that it began with.
- Fewest outstanding rows first, at most `window` batches in flight a link.
- What was in flight on a broken link goes to the head of its stage's line, with the input that the shell kept. After
  `max_attempts - 1` broken worlds the requests of a batch are isolated: each starts again, alone in its batch and alone
  on its link, so that blame is certain. Who breaks a world then is refused as poison. A link that was draining, or
  that broke with cause "left", blames nobody.
- A batch whose stage raised is tried once more on another replica; then its requests are isolated, and who raises
  again is refused as stage_error.
- Work for a stage without replicas waits `recovery_grace_s`, counted from when the stage became empty; then it is
  refused, and newcomers are until the stage is back. Work whose version lost a stage starts again under another
  version that is complete.
- A late batch is hedged: a second copy on another replica, the first answer wins.
- A link silent beyond `hang_timeout_s` with something in flight is broken; so is one that raised on several batches in a
  row which then succeeded elsewhere.
- A request that cannot be answered by its deadline, going by the rate at which full batches are answered, is refused at once.
- Events that come late (about a link already written off, a batch already answered) change nothing.

An event costs O(log n) in the number of links and open requests.
"""

from __future__ import annotations

from server.scheduling.actions import (
    Action,
    Answer,
    BreakLink,
    CloseLink,
    ForgetBatch,
    KeepOutput,
    Refusal,
    Refuse,
    SendBatch,
)
from server.scheduling.backlog import Backlog
from server.scheduling.batches import Copy, Request
from server.scheduling.config import SchedulerConfig
from server.scheduling.counters import Counters
from server.scheduling.dispatcher import Dispatcher
from server.scheduling.drain_rate import DrainRate
from server.scheduling.events import (
    BatchDone,
    BatchFailed,
    Drain,
    Event,
    LinkBroken,
    LinkDraining,
    LinkId,
    LinkReady,
    RequestArrived,
    RequestCancelled,
    Tick,
)
from server.scheduling.fleet import Fleet
from server.scheduling.hedging import Hedging
from server.scheduling.losses import Losses
from server.scheduling.outcomes import Outcomes
from server.scheduling.pools import Link
from server.scheduling.turn import Turn
from server.scheduling.work_times import WorkTimes

_MOST_UNMATCHED_FAILURES = 3
"""So many batches in a row a link may raise on that succeed elsewhere, before it is broken."""
_ADMISSION_MARGIN = 1.5
"""A request is let in when it has so many times the time that full batches take: who does not make it has cost others theirs."""

__all__ = [
    "Action",
    "Answer",
    "BatchDone",
    "BatchFailed",
    "BreakLink",
    "CloseLink",
    "Drain",
    "Event",
    "ForgetBatch",
    "KeepOutput",
    "LinkBroken",
    "LinkDraining",
    "LinkReady",
    "Refusal",
    "Refuse",
    "RequestArrived",
    "RequestCancelled",
    "Scheduler",
    "SchedulerConfig",
    "SendBatch",
    "Tick",
]


class Scheduler:
    """Event in, actions out. See the module's docstring for the rules."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.counters = Counters()
        self._fleet = Fleet(
            num_stages=config.num_stages,
            window=config.window,
            recovery_grace_s=config.recovery_grace_s,
            hang_timeout_s=config.hang_timeout_s,
        )
        self._backlog = Backlog()
        self._work_times = WorkTimes()
        self._hedging = Hedging(config, self._work_times)
        self._turn = Turn()
        self._drain_rate = DrainRate()
        self._dispatcher = Dispatcher(
            config, self._turn, self._backlog, self._fleet, self._hedging, self._work_times, self.counters
        )
        self._outcomes = Outcomes(
            self._dispatcher, self._turn, self._backlog, self._fleet, self._hedging, self._drain_rate, self.counters
        )
        self._losses = Losses(
            config, self._dispatcher, self._outcomes, self._turn, self._fleet, self._hedging, self.counters
        )
        self._draining = False

    # What the shell calls.

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take in what has happened and say what to do, in order, before the next event is handled.

        Args:
            now_s: monotonic time of the event; an earlier time than that of the event before counts as the same.
        Raises:
            ValueError: the event makes no sense (a stage that there is not, a request id that is still open).
        """
        self._pass_time(now_s)
        self._turn.actions = []
        self._apply(event)
        self._expire_deadlines()
        self._break_silent_links()
        self._expire_graces()
        self._dispatcher.dispatch()
        self._dispatcher.hedge()
        return self._turn.actions

    def next_wakeup_s(self) -> float | None:
        """When a `Tick` is wanted at the latest; None while nothing waits for time to pass."""
        times = (
            self._backlog.deadlines.least(),
            self._fleet.hangs.least(),
            self._fleet.graces.least(),
            self._hedging.late.least(),
            self._dispatcher.next_batch_s(),
        )
        return min((time_s for time_s in times if time_s is not None), default=None)

    def refusal(self, deadline_s: float, now_s: float, *, ahead: int) -> Refusal | None:
        """What a request that arrived now, after `ahead` others, would be refused for; None if it would be accepted."""
        self._pass_time(now_s)
        return self._refusal(deadline_s, ahead)

    # Figures, all cheap.

    @property
    def ready(self) -> bool:
        """A version is complete and newcomers are accepted."""
        return self._fleet.current is not None and not self._draining

    @property
    def current_version(self) -> str | None:
        """The version that new batches go through."""
        return self._fleet.current.version if self._fleet.current else None

    @property
    def queue_depth(self) -> int:
        """Requests that wait for a batch, isolated ones included."""
        return len(self._backlog.waiting) + len(self._backlog.isolated)

    @property
    def open_requests(self) -> int:
        """Accepted and not closed. Zero after `Drain`: all is finished."""
        return len(self._backlog.requests)

    def in_flight(self, link: LinkId) -> int:
        """Batches in flight on this link; 0 if there is no such link."""
        known = self._fleet.links.get(link)
        return len(known.copies) if known else 0

    def batches_of(self, version: str) -> int:
        """Batches that began with this version and have not ended: as long as there are any, it is in use."""
        pipeline = self._fleet.pipelines.get(version)
        return pipeline.num_batches if pipeline else 0

    def batches_waiting(self, stage: int) -> int:
        """Batches that wait for a replica of this stage, all versions."""
        return sum(pipeline.pools[stage].waiting for pipeline in self._fleet.pipelines.values())

    # Events.

    def _pass_time(self, now_s: float) -> None:
        now_s = max(now_s, self._turn.now_s)
        busy, full = bool(self._backlog.requests), len(self._backlog.waiting) >= self.config.max_batch_size
        full = (
            full and self._fleet.current is not None
        )  # a stage without replicas says nothing about how fast work would go
        self._drain_rate.elapse(now_s - self._turn.now_s, busy=busy, full=full)
        self._turn.now_s = now_s

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
            case LinkReady():
                self._link_ready(event)
            case LinkDraining():
                self._link_draining(event)
            case LinkBroken():
                self._link_broken(event)
            case Drain():
                self._dispatcher.hurry = True
                self._draining = not event.admits
            case Tick():
                pass

    def _arrived(self, event: RequestArrived) -> None:
        if event.request in self._backlog.requests:
            raise ValueError(f"request {event.request} is still open")
        refusal = self._refusal(event.deadline_s, ahead=0)
        if refusal is None:
            now_s = self._turn.now_s
            self._backlog.admit(Request(event.request, event.deadline_s, arrived_s=now_s, since_s=now_s))
            self.counters.accepted += 1
        else:
            self._outcomes.turn_away(event.request, *refusal)

    def _refusal(self, deadline_s: float, ahead: int) -> Refusal | None:
        if self._draining:
            return Refusal("draining", "the server is stopping")
        if not self._fleet.was_complete:
            return Refusal("not_ready", "not every stage has had a replica yet")
        if self._fleet.lost:
            return Refusal("no_replica", self._lost_detail())
        patience_s = deadline_s - self._turn.now_s
        if patience_s <= 0:
            return Refusal("deadline", "the deadline had passed on arrival")
        return self._overload(ahead, patience_s)

    def _overload(self, ahead: int, patience_s: float) -> Refusal | None:
        waiting, open_requests = len(self._backlog.waiting) + ahead, len(self._backlog.requests) + ahead
        if waiting >= self.config.queue_limit:
            retry_after_s = self._drain_rate.time_to_drain_s(waiting)
            return Refusal("overloaded", f"{waiting} requests are waiting already", retry_after_s)
        needed_s = _ADMISSION_MARGIN * self._drain_rate.least_time_s(open_requests)
        if needed_s > patience_s:
            detail = f"{open_requests} requests are before it, which takes {needed_s:.1f} s, and its deadline is sooner"
            return Refusal("overloaded", detail, needed_s - patience_s)
        return None

    def _cancelled(self, event: RequestCancelled) -> None:
        request = self._backlog.requests.get(event.request)
        if request is not None:
            self.counters.cancelled += 1
            self._outcomes.close(request)

    def _link_ready(self, event: LinkReady) -> None:
        if not 0 <= event.stage < self.config.num_stages:
            raise ValueError(f"link {event.link} is for stage {event.stage} of {self.config.num_stages}")
        if event.link not in self._fleet.links:
            self._fleet.join(event.link, event.stage, event.version, self._turn.now_s)
            self._losses.fleet_changed()

    def _link_draining(self, event: LinkDraining) -> None:
        link = self._fleet.links.get(event.link)
        if link is not None and not link.draining:
            link.draining = True
            self._fleet.close(link, self._turn.now_s)
            self._losses.fleet_changed()
            self._losses.close_if_drained(link)

    def _link_broken(self, event: LinkBroken) -> None:
        link = self._fleet.links.get(event.link)
        if link is not None:
            self._losses.break_link(link, event.cause)

    def _done(self, event: BatchDone) -> None:
        copy = self._land(event)
        if copy is None:
            return
        batch = copy.batch
        copy.link.unmatched_failures = 0
        self._settle_hedge(copy)
        if batch.failed_on is not None:
            self._count_failure_of(batch.failed_on)
        batch.path.append(copy.link.id)
        if batch.stage + 1 == self.config.num_stages:
            self._outcomes.answer(batch, copy.link)
        else:
            batch.advance(self._turn.now_s)
            self._turn.actions.append(KeepOutput(batch.id, copy.link.id, batch.stage))
            self._outcomes.wait(batch, "first", at_head=False)

    def _failed(self, event: BatchFailed) -> None:
        copy = self._land(event)
        if copy is None:
            return
        batch = copy.batch
        if self._losses.other_copy_remains(copy):
            batch.retried = True
        elif batch.isolated:
            self._outcomes.refuse_all(batch, "stage_error", f"stage {batch.stage} raised: {event.error}")
        elif batch.retried or not batch.pool.has_other(copy.link):
            self._outcomes.isolate(batch)
        else:
            batch.retried = True
            batch.failed_on = copy.link
            batch.since_s = self._turn.now_s
            self._outcomes.wait(batch, "retry", at_head=False)

    def _land(self, event: BatchDone | BatchFailed) -> Copy | None:
        """Free the copy's place on its link. Returns it if its batch still wants what it brings."""
        link = self._fleet.links.get(event.link)
        copy = link.copies.get(event.batch) if link else None
        if link is None or copy is None:
            return None
        worked_s = self._fleet.landed(copy, self._turn.now_s)
        self._hedging.forget(copy)
        if isinstance(event, BatchDone):
            self._work_times.observe(copy, worked_s, event.computed_s, event.transfer_s)
        self._dispatcher.touch(link.pool)
        self._losses.close_if_drained(link)
        return copy if copy.detach() else None

    def _count_failure_of(self, link: Link) -> None:
        """A batch on which this link raised has succeeded elsewhere: it was not the batch's fault."""
        link.unmatched_failures += 1
        if link.unmatched_failures >= _MOST_UNMATCHED_FAILURES and self._fleet.links.get(link.id) is link:
            self._turn.actions.append(BreakLink(link.id, "error"))
            self._losses.break_link(link, "error")

    def _settle_hedge(self, winner: Copy) -> None:
        """The winner has answered; what other copy there is keeps its place in the window and is not wanted any more."""
        if winner.kind == "hedge":
            self.counters.hedges["won"] += 1
        self._outcomes.abandon_copies(winner.batch, hedges="lost")

    # Time passes.

    def _expire_deadlines(self) -> None:
        while (request := self._backlog.deadlines.pop_until(self._turn.now_s)) is not None:
            self._outcomes.refuse(request, "deadline", f"no answer after {self._turn.now_s - request.arrived_s:.3f} s")

    def _break_silent_links(self) -> None:
        while (link := self._fleet.hangs.pop_until(self._turn.now_s)) is not None:
            self.counters.hangs += 1
            self._turn.actions.append(BreakLink(link.id, "hang"))
            self._losses.break_link(link, "hang")

    def _expire_graces(self) -> None:
        while (pool := self._fleet.graces.pop_until(self._turn.now_s)) is not None:
            pool.expired = True
            for batch in pool.batches():
                self._outcomes.refuse_all(batch, "no_replica", self._lost_detail(pool.stage))
        if self.open_requests and self._fleet.lost:
            for request in (*self._backlog.waiting.values(), *self._backlog.isolated.values()):
                self._outcomes.refuse(request, "no_replica", self._lost_detail())

    def _lost_detail(self, stage: int | None = None) -> str:
        where = "a stage" if stage is None else f"stage {stage}"
        return f"{where} has had no replica for more than {self.config.recovery_grace_s:g} s"
