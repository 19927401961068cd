"""The scheduler's promises, asserted after every event.

The checker keeps accounts of its own (`Ledger`) from what goes in and comes out. Of the scheduler it reads only the
public figures, to compare them with its own.
"""

from __future__ import annotations

from server.scheduler import (
    Action,
    Answer,
    BatchDone,
    BatchFailed,
    BreakLink,
    CloseLink,
    Drain,
    Event,
    ForgetBatch,
    KeepOutput,
    LinkBroken,
    LinkDraining,
    LinkReady,
    Refuse,
    RequestArrived,
    RequestCancelled,
    Scheduler,
    SendBatch,
)
from tests.simulation.ledger import BatchEntry, Ledger, LinkEntry, RequestEntry


class Checker:
    """Call `check` with every event and what the scheduler made of it. Raises AssertionError."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._config = scheduler.config
        self._ledger = Ledger(scheduler.config.num_stages)
        self._draining = False
        self._last_number_taken = 0
        self._rows_sent = 0
        self._hedge_rows_sent = 0
        self._versions_seen: set[str] = set()
        self.outcomes: dict[int, str] = {}
        """What became of each request: "answered", "cancelled" or the reason of its refusal."""

    def check(self, event: Event, actions: list[Action], now_s: float) -> None:
        self._now_s = now_s
        self._event = event
        self._landed: BatchEntry | None = None
        self._claimed = False
        self._take_in(event)
        for action in actions:
            self._follow(action)
        self._check_state()

    def check_finished(self) -> None:
        """At the end, when no request is open: nothing is kept."""
        assert not self._ledger.requests
        assert not self._ledger.batches
        assert self._scheduler.open_requests == 0
        assert self._scheduler.queue_depth == 0
        assert all(self._scheduler.batches_waiting(stage) == 0 for stage in range(self._config.num_stages))

    # Events: what the world says.

    def _take_in(self, event: Event) -> None:
        ledger = self._ledger
        match event:
            case RequestArrived():
                self._waiting_before = sum(not self._may_be_isolated(request) for request in ledger.waiting())
                ledger.arrive(event, self._now_s)
            case RequestCancelled():
                if (request := ledger.requests.get(event.request)) is not None:
                    self._close(request, "cancelled")
            case LinkReady():
                self._versions_seen.add(event.version)
                ledger.add_link(event, self._now_s)
            case LinkDraining():
                if (link := ledger.links.get(event.link)) is not None and not link.draining:
                    ledger.stop_link(link, self._now_s)
                    link.draining = True
            case LinkBroken():
                if (link := ledger.links.get(event.link)) is not None:
                    self._write_off(link, blames=event.cause != "left")
            case BatchDone():
                self._land(event.batch, event.link)
            case BatchFailed():
                self._land(event.batch, event.link)
                if self._landed is not None:
                    self._fail(self._landed, event.link)
            case Drain():
                self._draining = True

    def _land(self, batch_id: int, link_id: str) -> None:
        link = self._ledger.links.get(link_id)
        batch = link.in_flight.pop(batch_id, None) if link else None
        if link is None or batch is None:
            return
        link.silent_since_s = self._now_s
        if link_id in batch.copies:
            batch.copies.discard(link_id)
            self._landed = batch

    def _fail(self, batch: BatchEntry, link: str) -> None:
        batch.failed_on = link
        for request in self._open(batch):
            request.errors += 1
            request.suspect = True

    def _write_off(self, link: LinkEntry, *, blames: bool) -> None:
        """The link is gone: so many copies are lost."""
        alone = len(link.in_flight) == 1
        for batch in link.in_flight.values():
            if link.id not in batch.copies:
                continue
            batch.lost, batch.failed_on = True, None
            requests = self._open(batch) if blames and not link.draining else []
            for request in requests:
                request.worlds_broken += 1
                request.broke_alone = alone and len(batch.requests) == 1
            if any(request.worlds_broken >= self._config.max_attempts - 1 for request in requests):
                for request in requests:
                    request.suspect = True
        self._ledger.remove_link(link, self._now_s)

    # Actions: what the scheduler says.

    def _follow(self, action: Action) -> None:
        match action:
            case SendBatch():
                self._follow_send(action)
            case KeepOutput():
                self._follow_keep(action)
            case Answer():
                self._follow_answer(action)
            case Refuse():
                self._follow_refusal(action)
            case ForgetBatch():
                self._ledger.forget(self._batch(action.batch))
            case BreakLink():
                link = self._ledger.links[action.link]
                assert link.in_flight, "broke an idle link"
                assert self._now_s >= link.silent_since_s + self._config.hang_timeout_s, "broke a link too early"
                self._write_off(link, blames=True)
            case CloseLink():
                link = self._ledger.links[action.link]
                assert link.draining
                assert not link.in_flight, "closed a link with something in flight"
                self._ledger.remove_link(link, self._now_s)

    def _follow_send(self, action: SendBatch) -> None:
        link = self._ledger.links.get(action.link)
        assert link is not None, "sent over a link that is not there"
        assert not link.draining, "sent over a draining link"
        assert link.stage == action.stage, "sent to the wrong stage"
        assert link.version == action.version, "sent to the wrong version"
        assert len(link.in_flight) < self._config.window, "window exceeded"
        assert not link.carries_suspect, "sent over a link that carries a suspect"
        batch = self._ledger.batches.get(action.batch) or self._follow_new_batch(action)
        assert tuple(request.id for request in batch.requests) == action.requests, "the rows of a batch changed"
        assert (batch.version, batch.stage, batch.isolated) == (action.version, action.stage, action.isolated)
        assert any(self._open(batch)), "sent a batch that nobody waits for"
        assert not batch.isolated or not link.in_flight, "a suspect must travel alone on its link"
        self._check_kind(action, batch)
        self._check_least_loaded(batch, link, action)
        self._check_reroutes_go_first(action, batch)
        if not link.in_flight:
            link.silent_since_s = self._now_s
        link.in_flight[batch.id] = batch
        batch.copies.add(link.id)
        batch.sent, batch.lost, batch.failed_on = True, False, None

    def _follow_new_batch(self, action: SendBatch) -> BatchEntry:
        assert action.batch > self._ledger.newest_batch, "a batch id was used twice"
        assert action.kind == "first"
        assert action.stage == 0
        assert 1 <= len(action.requests) <= self._config.max_batch_size
        assert action.version == self._ledger.current_version(), "a new batch for another than the current version"
        requests = tuple(self._ledger.requests[request] for request in action.requests)
        assert all(request.batch is None for request in requests), "a request in two batches"
        assert all(request.deadline_s > self._now_s for request in requests), "computed after the deadline"
        for request in requests:
            if not request.travelled:
                assert request.number > self._last_number_taken, "not first come first served"
                self._last_number_taken = request.number
        if action.isolated:
            assert len(requests) == 1, "a suspect must be alone in its batch"
            assert requests[0].suspect, "isolated for nothing"
        return self._ledger.open_batch(action, requests)

    def _check_kind(self, action: SendBatch, batch: BatchEntry) -> None:
        rows = len(batch.requests)
        if action.kind == "hedge":
            assert batch.copies, "a hedge without a first copy"
            assert len(batch.copies) < 2, "hedged twice"
            assert action.link not in batch.copies, "hedged over the same link"
            assert not batch.isolated, "hedged a suspect"
            self._hedge_rows_sent += rows
            budget = self._config.hedge_budget * self._rows_sent
            assert self._hedge_rows_sent <= budget + 1e-6, "hedge budget exceeded"
            return
        self._rows_sent += rows
        assert not batch.copies, "sent again while a copy is in flight"
        if action.kind == "first":
            assert not batch.sent, "sent twice as first"
        elif action.kind == "reroute":
            assert batch.lost, "rerouted without a loss"
        else:
            assert batch.failed_on is not None, "retried without a failure"
            assert batch.failed_on != action.link, "retried where it failed"
            batch.retries += 1
            assert batch.retries == 1, "retried more than once"

    def _check_least_loaded(self, batch: BatchEntry, link: LinkEntry, action: SendBatch) -> None:
        if self._has_suspects():
            return  # a link may be reserved, which only the scheduler knows
        rivals = [
            other
            for other in self._ledger.replicas(link.stage, link.version)
            if len(other.in_flight) < self._config.window
            and other.id not in batch.copies
            and (action.kind != "retry" or other.id != batch.failed_on)
        ]
        assert link.rows <= min(other.rows for other in rivals), "not the least loaded replica"

    def _check_reroutes_go_first(self, action: SendBatch, batch: BatchEntry) -> None:
        if action.kind != "first" or batch.isolated:
            return
        for other in self._ledger.batches.values():
            rerouted = other.lost and not other.copies and not other.isolated
            same_line = (other.stage, other.version) == (batch.stage, batch.version)
            assert not (rerouted and same_line), f"batch {other.id} lost its link and has to wait"

    def _follow_keep(self, action: KeepOutput) -> None:
        batch = self._claim_output(action.batch, action.link)
        assert action.stage == batch.stage + 1 < self._config.num_stages
        batch.stage = action.stage
        batch.sent, batch.lost, batch.failed_on, batch.retries = False, False, None, 0
        batch.copies.clear()

    def _follow_answer(self, action: Answer) -> None:
        batch = self._claim_output(action.batch, action.link)
        assert batch.stage == self._config.num_stages - 1, "answered before the last stage"
        assert tuple(batch.path) == action.path
        assert action.version == batch.version
        assert [request for request, _ in action.rows] == [request.id for request in self._open(batch)]
        for request_id, row in action.rows:
            assert batch.requests[row].id == request_id, "somebody else's row"
            self._close(batch.requests[row], "answered")

    def _claim_output(self, batch_id: int, link: str) -> BatchEntry:
        """The output may be used once, of the copy that has just come back."""
        batch = self._batch(batch_id)
        assert isinstance(self._event, BatchDone)
        assert batch is self._landed, "used an output that is not there"
        assert (self._event.batch, self._event.link) == (batch_id, link)
        assert not self._claimed, "used an output twice"
        self._claimed = True
        batch.path.append(link)
        return batch

    def _follow_refusal(self, action: Refuse) -> None:
        request = self._ledger.requests.get(action.request)
        assert request is not None, f"refused {action.request} ({action.reason}), which is not open"
        newcomer = isinstance(self._event, RequestArrived) and self._event.request == action.request
        assert newcomer or action.reason not in ("overloaded", "not_ready", "draining")
        assert (action.retry_after_s is not None) == (action.reason == "overloaded")
        self._check_reason(action, request)
        self._close(request, action.reason)

    def _check_reason(self, action: Refuse, request: RequestEntry) -> None:
        match action.reason:
            case "overloaded":
                assert self._waiting_before >= self._config.queue_limit, "refused with room in the queue"
                assert action.retry_after_s is not None
                assert 0 < action.retry_after_s <= 60
            case "deadline":
                assert self._now_s >= request.deadline_s, "refused before the deadline"
            case "no_replica":
                assert self._is_lost(request), "gave up on a stage too early"
            case "not_ready":
                assert not self._ledger.was_complete
            case "draining":
                assert self._draining
            case "poison":
                assert request.worlds_broken >= self._config.max_attempts, "too few broken worlds for poison"
                assert request.broke_alone, "poison without certain blame"
            case "stage_error":
                assert isinstance(self._event, BatchFailed)
                assert self._landed is not None
                assert self._landed.isolated, "blamed for an error in company"
                assert request.errors + request.worlds_broken >= 2, "refused at the first error"

    def _is_lost(self, request: RequestEntry) -> bool:
        """The stage that it needs, or for one in the queue some stage, has been empty for the grace."""
        grace_ends_s = self._now_s - self._config.recovery_grace_s
        if self._ledger.complete_versions():
            return False
        if request.batch is not None:
            empty_since_s = self._ledger.empty_since_s.get((request.batch.version, request.batch.stage))
            return empty_since_s is not None and empty_since_s <= grace_ends_s + 1e-9
        return any(since_s <= grace_ends_s + 1e-9 for since_s in self._ledger.empty_since_s.values())

    # Afterwards.

    def _check_state(self) -> None:
        ledger, config, now_s = self._ledger, self._config, self._now_s
        assert self._scheduler.open_requests == len(ledger.requests), "requests lost or double"
        waiting = ledger.waiting()
        assert self._scheduler.queue_depth == len(waiting)
        newcomers = sum(not request.travelled for request in waiting)
        assert newcomers <= config.queue_limit, "queue limit exceeded"
        if ledger.requests:
            assert min(request.deadline_s for request in ledger.requests.values()) > now_s, "a deadline was missed"
        for link in ledger.links.values():
            assert len(link.in_flight) == self._scheduler.in_flight(link.id)
            if link.in_flight:
                assert now_s < link.silent_since_s + config.hang_timeout_s, "a silent link was not broken"
            else:
                assert not link.draining, "a drained link was not closed"
        self._suspects_about = self._has_suspects()
        self._check_batches()
        self._check_nothing_idles(waiting)
        if waiting and len(self._versions_seen) == 1:
            oldest_gap_s = min(ledger.empty_since_s.values(), default=now_s)
            assert now_s < oldest_gap_s + config.recovery_grace_s, "waits for a stage that is lost"
        self._check_wakeup(waiting)

    def _check_wakeup(self, waiting: list[RequestEntry]) -> None:
        """A tick is wanted in the future, and before anything falls due."""
        ledger, config = self._ledger, self._config
        wakeup_s = self._scheduler.next_wakeup_s()
        assert wakeup_s is None or wakeup_s > self._now_s, "a wakeup in the past"
        due_s = [request.deadline_s for request in ledger.requests.values()]
        due_s += [link.silent_since_s + config.hang_timeout_s for link in ledger.links.values() if link.in_flight]
        if waiting and len(self._versions_seen) == 1:
            due_s += [since_s + config.recovery_grace_s for since_s in ledger.empty_since_s.values()]
        if waiting and self._entry_has_room() and all(batch.copies for batch in ledger.batches.values()):
            due_s.append(min(request.arrived_s for request in waiting) + config.batch_timeout_s)
        if due_s:
            assert wakeup_s is not None, "no wakeup, and something will fall due"
            assert wakeup_s <= min(due_s) + 1e-9, "a wakeup after something has fallen due"

    def _check_batches(self) -> None:
        ledger, config = self._ledger, self._config
        kept = sum(1 for batch in ledger.batches.values() if not batch.isolated)
        versions = max(1, len(self._versions_seen))
        limit = (config.window + 1) * ledger.most_links + config.num_stages
        assert kept <= limit * versions, "more batches are kept than back pressure allows"
        suspects = len(ledger.batches) - kept
        assert suspects <= 2 * config.num_stages * versions, "more suspects travel than isolation allows"
        for batch in ledger.batches.values():
            assert any(self._open(batch)), "a batch is kept that nobody waits for"

    def _check_nothing_idles(self, waiting: list[RequestEntry]) -> None:
        """No work waits that a replica could take."""
        if self._suspects_about:
            return
        held_back = False
        for batch in self._ledger.batches.values():
            if batch.copies:
                continue
            held_back = True
            replicas = self._ledger.replicas(batch.stage, batch.version)
            assert replicas or not self._ledger.complete_versions(), f"batch {batch.id} is stranded"
            for link in replicas:
                roomy = len(link.in_flight) < self._config.window and link.id != batch.failed_on
                assert not roomy, f"batch {batch.id} waits while {link.id} has room"
        if held_back or not waiting:
            return
        due = min(request.arrived_s for request in waiting) + self._config.batch_timeout_s <= self._now_s
        if due or len(waiting) >= self._config.max_batch_size or self._draining:
            assert not self._entry_has_room(), "requests wait while the first stage has room"

    def _entry_has_room(self) -> bool:
        """Whatever the current version is, and nothing is reserved for suspects."""
        versions = self._ledger.complete_versions()
        return bool(versions) and not self._suspects_about and all(self._has_room(version) for version in versions)

    def _has_room(self, version: str) -> bool:
        return any(len(link.in_flight) < self._config.window for link in self._ledger.replicas(0, version))

    def _may_be_isolated(self, request: RequestEntry) -> bool:
        """A suspect that waits is, unless it was sent back to start again under another version."""
        return request.suspect and len(self._versions_seen) == 1

    def _has_suspects(self) -> bool:
        """Somebody is isolated, or may be."""
        return any(
            request.suspect and (request.batch is None or request.batch.isolated)
            for request in self._ledger.requests.values()
        ) or any(link.carries_suspect for link in self._ledger.links.values())

    def _batch(self, batch_id: int) -> BatchEntry:
        batch = self._ledger.batches.get(batch_id)
        assert batch is not None, "a batch that does not exist or was forgotten"
        return batch

    def _open(self, batch: BatchEntry) -> list[RequestEntry]:
        return [request for request in batch.requests if request.batch is batch and self._ledger.is_open(request)]

    def _close(self, request: RequestEntry, outcome: str) -> None:
        assert request.id not in self.outcomes, "a second outcome for one request"
        self.outcomes[request.id] = outcome
        self._ledger.close(request)
