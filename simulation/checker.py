"""The scheduler's promises, asserted after every event.

Those of DESIGN.md, with what makes them certain:

1. Every accepted request gets exactly one answer or refusal, or is cancelled: nothing that is closed is closed again,
   the rows of an answer are those of its own requests, and the scheduler's count of open requests is ours.
2. No later than its deadline plus one tick: after an event at `now_s` no open request's deadline has passed, and a tick is
   asked for before the next deadline, hang, end of a grace or batch falls due.
3. A batch goes only to a link that is ready and not draining, of the right stage and version; new ones are of the newest
   version that is complete; an output is used once, of the copy that has just come back, in the order of stages.
4. At most `window` in flight a link, and the scheduler's count is ours; at most `queue_limit` newcomers wait; so many
   batches are kept at most as back pressure allows; nothing is kept that nobody waits for, and at the end nothing at all.
5. Poison: refused as such after `max_attempts` broken worlds, the last one broken alone; suspects travel alone in their
   batch and on their link; nobody is blamed for a draining link or for one that left. No request breaks more than one
   world beyond `max_attempts`.
6. A stage without replicas holds its work for `recovery_grace_s`, not shorter and not longer.
7. The least loaded replica first; first come first served, reroutes before the rest; a batch is sent again only for a
   loss, a failure (once, elsewhere) or as a hedge (a second copy, elsewhere, never of a suspect, within `hedge_budget`).
8. A link that is silent for `hang_timeout_s` with something in flight is broken, and none earlier; a link broken for
   errors has raised; a drained link is closed, when it is empty.
9. Nothing idles: no batch and no due request waits while a replica that could take it has room.
10. Refusals are true: each reason's condition holds by our own account.

The checker keeps accounts of its own (`Ledger`) from what goes in and comes out. Of the scheduler it reads only the
public figures, to compare them with its own. Causes of broken links and reasons of refusals that it does not know pass:
what is permitted then is the scenario's business (verdict.py).
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
from simulation.ledger import BatchEntry, Ledger, LinkEntry, RequestEntry


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
        self._waiting_before = self._open_before = 0

    def check(self, event: Event, actions: list[Action], now_s: float, wakeup_s: float | None) -> None:
        """Assert all promises after this event.

        Args:
            actions: what the scheduler made of it.
            wakeup_s: its `next_wakeup_s()` afterwards.
        """
        self._now_s = now_s
        self._wakeup_s = wakeup_s
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
        ledger, now_s = self._ledger, self._now_s
        match event:
            case RequestArrived():
                isolated = sum(self._may_be_isolated(request) for request in ledger.suspects.values())
                self._waiting_before = len(ledger.waiting) - isolated
                self._open_before = len(ledger.requests)
                ledger.arrive(event, now_s)
            case RequestCancelled():
                if (request := ledger.requests.get(event.request)) is not None:
                    ledger.close(request)
            case LinkReady():
                self._versions_seen.add(event.version)
                ledger.add_link(event, now_s)
            case LinkDraining():
                if (link := ledger.links.get(event.link)) is not None and not link.draining:
                    ledger.drain_link(link, now_s)
            case LinkBroken():
                if (link := ledger.links.get(event.link)) is not None:
                    self._write_off(link, blames=event.cause != "left")
            case BatchDone():
                self._landed = ledger.land(event.batch, event.link, now_s)
            case BatchFailed():
                self._take_in_failure(event)
            case Drain():
                self._draining = True

    def _take_in_failure(self, event: BatchFailed) -> None:
        link = self._ledger.links.get(event.link)
        if link is not None and event.batch in link.in_flight:
            link.failures += 1
        self._landed = batch = self._ledger.land(event.batch, event.link, self._now_s)
        if batch is not None:
            batch.failed_on = event.link
            for request in batch.open_requests():
                request.errors += 1
                self._ledger.suspect(request)

    def _write_off(self, link: LinkEntry, *, blames: bool) -> None:
        """The link is gone: so many copies are lost."""
        alone = len(link.in_flight) == 1
        for batch in link.in_flight.values():
            if link.id not in batch.copies:
                continue
            batch.lost, batch.failed_on = True, None
            requests = batch.open_requests() if blames and not link.draining else []
            for request in requests:
                request.worlds_broken += 1
                request.broke_alone = alone and len(batch.requests) == 1
                # One more than the limit where two copies were in flight when it was reached.
                assert request.worlds_broken <= self._config.max_attempts + 1, "one request eats all replicas"
            if any(request.worlds_broken >= self._config.max_attempts - 1 for request in requests):
                for request in requests:
                    self._ledger.suspect(request)
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
                self._follow_break(action)
            case CloseLink():
                link = self._ledger.links[action.link]
                assert link.draining
                assert not link.in_flight, "closed a link with something in flight"
                self._ledger.remove_link(link, self._now_s)

    def _follow_break(self, action: BreakLink) -> None:
        link = self._ledger.links[action.link]
        if action.cause == "hang":
            assert link.in_flight, "broke an idle link for its silence"
            assert self._now_s >= link.silent_since_s + self._config.hang_timeout_s, "broke a link too early"
        elif action.cause == "error":
            assert link.failures, "broke a link for errors that there were not"
        self._write_off(link, blames=action.cause != "left")

    def _follow_send(self, action: SendBatch) -> None:
        link = self._ledger.links.get(action.link)
        assert link is not None, "sent over a link that is not there"
        assert not link.draining, "sent over a draining link"
        assert link.stage == action.stage, "sent to the wrong stage"
        assert link.version == action.version, "sent to the wrong version"
        assert len(link.in_flight) < self._config.window, "window exceeded"
        assert not link.suspects, "sent over a link that carries a suspect"
        batch = self._ledger.batches.get(action.batch) or self._follow_new_batch(action)
        assert tuple(request.id for request in batch.requests) == action.requests, "the rows of a batch changed"
        assert (batch.version, batch.stage, batch.isolated) == (action.version, action.stage, action.isolated)
        assert batch.open, "sent a batch that nobody waits for"
        assert not batch.isolated or not link.in_flight, "a suspect must travel alone on its link"
        self._check_kind(action, batch)
        self._check_least_loaded(batch, link, action)
        self._check_reroutes_go_first(action, batch)
        self._ledger.send(batch, link, self._now_s)

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
        window, elsewhere = self._config.window, batch.failed_on if action.kind == "retry" else None
        for other in self._ledger.replicas(link.stage, link.version).values():
            if other.rows < link.rows and len(other.in_flight) < window and other.id not in batch.copies:
                assert other.id == elsewhere, "not the least loaded replica"

    def _check_reroutes_go_first(self, action: SendBatch, batch: BatchEntry) -> None:
        if action.kind != "first" or batch.isolated:
            return
        for other in self._ledger.held_back.values():
            # One that raised there before it lost another link goes elsewhere, and lets the others pass.
            rerouted = other.lost and not other.isolated and other.failed_on != action.link
            same_line = (other.stage, other.version) == (batch.stage, batch.version)
            assert not (rerouted and same_line), f"batch {other.id} lost its link and has to wait"

    def _follow_keep(self, action: KeepOutput) -> None:
        batch = self._claim_output(action.batch, action.link)
        assert action.stage == batch.stage + 1 < self._config.num_stages
        self._ledger.advance(batch)

    def _follow_answer(self, action: Answer) -> None:
        batch = self._claim_output(action.batch, action.link)
        assert batch.stage == self._config.num_stages - 1, "answered before the last stage"
        assert tuple(batch.path) == action.path
        assert action.version == batch.version
        assert [request for request, _ in action.rows] == [request.id for request in batch.open_requests()]
        for request_id, row in action.rows:
            assert batch.requests[row].id == request_id, "somebody else's row"
            self._ledger.close(batch.requests[row])

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
        assert action.retry_after_s is None or 0 < action.retry_after_s <= 60, "no honest Retry-After"
        self._check_reason(action, request)
        self._ledger.close(request)

    def _check_reason(self, action: Refuse, request: RequestEntry) -> None:
        match action.reason:
            case "overloaded":
                full = self._waiting_before >= self._config.queue_limit
                assert full or self._open_before, "refused with room in the queue and nothing before it"
                assert action.retry_after_s is not None
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
        if self._ledger.complete_versions:
            return False
        if request.batch is not None:
            empty_since_s = self._ledger.empty_since_s.get((request.batch.version, request.batch.stage))
            return empty_since_s is not None and empty_since_s <= grace_ends_s + 1e-9
        return any(since_s <= grace_ends_s + 1e-9 for since_s in self._ledger.empty_since_s.values())

    # Afterwards.

    def _check_state(self) -> None:
        ledger, config, now_s, scheduler = self._ledger, self._config, self._now_s, self._scheduler
        assert scheduler.open_requests == len(ledger.requests), "requests lost or double"
        assert scheduler.queue_depth == len(ledger.waiting)
        assert ledger.newcomers <= config.queue_limit, "queue limit exceeded"
        deadline_s = ledger.next_deadline_s()
        assert deadline_s > now_s, "a deadline was missed"
        silent_since_s = self._check_links()
        hang_s = silent_since_s + config.hang_timeout_s
        assert now_s < hang_s, "a silent link was not broken"
        self._suspects_about = bool(ledger.suspects or ledger.isolated_in_flight) and self._has_suspects()
        self._check_batches()
        self._check_nothing_idles()
        lost_s = float("inf")
        if ledger.waiting and ledger.empty_since_s and len(self._versions_seen) == 1:
            lost_s = min(ledger.empty_since_s.values()) + config.recovery_grace_s
            assert now_s < lost_s, "waits for a stage that is lost"
        self._check_wakeup(min(deadline_s, hang_s, lost_s))

    def _check_links(self) -> float:
        """Returns since when the most silent of those that owe an answer has been silent; infinity if there is none."""
        silent_since_s, in_flight = float("inf"), self._scheduler.in_flight
        for link in self._ledger.links.values():
            owed = len(link.in_flight)
            assert owed == in_flight(link.id), "batches in flight lost or double"
            if owed:
                silent_since_s = min(silent_since_s, link.silent_since_s)
            else:
                assert not link.draining, "a drained link was not closed"
        return silent_since_s

    def _check_wakeup(self, due_s: float) -> None:
        """A tick is wanted in the future, and before anything falls due."""
        ledger, wakeup_s = self._ledger, self._wakeup_s
        assert wakeup_s is None or wakeup_s > self._now_s, "a wakeup in the past"
        if ledger.waiting and not ledger.held_back and self._entry_has_room():
            due_s = min(due_s, self._batch_due_s())
        if due_s < float("inf"):
            assert wakeup_s is not None, "no wakeup, and something will fall due"
            assert wakeup_s <= due_s + 1e-9, "a wakeup after something has fallen due"

    def _check_batches(self) -> None:
        ledger, config = self._ledger, self._config
        suspects, versions = ledger.isolated_batches, max(1, len(self._versions_seen))
        limit = (config.window + 1) * ledger.most_links + config.num_stages
        assert len(ledger.batches) - suspects <= limit * versions, "more batches are kept than back pressure allows"
        assert suspects <= 2 * config.num_stages * versions, "more suspects travel than isolation allows"
        assert not ledger.unwanted, "a batch is kept that nobody waits for"

    def _check_nothing_idles(self) -> None:
        """No work waits that a replica could take."""
        ledger, config = self._ledger, self._config
        if self._suspects_about:
            return
        for batch in ledger.held_back.values():
            replicas = ledger.replicas(batch.stage, batch.version)
            assert replicas or not ledger.complete_versions, f"batch {batch.id} is stranded"
            for link in replicas.values():
                roomy = len(link.in_flight) < config.window and link.id != batch.failed_on
                assert not roomy, f"batch {batch.id} waits while {link.id} has room"
        if ledger.held_back or not ledger.waiting or not self._entry_has_room():
            return
        full = len(ledger.waiting) >= config.max_batch_size or self._draining
        assert not full, "a full batch waits while the first stage has room"
        assert not (config.adaptive_batching and self._entry_idles()), "requests wait while a replica idles"
        assert self._now_s < self._batch_due_s(), "requests wait while the first stage has room"

    def _batch_due_s(self) -> float:
        """When the oldest request goes at the latest. Adaptive, it may wait while a replica may be busy, by what work took so far."""
        config, ledger = self._config, self._ledger
        due_s = min(request.arrived_s for request in ledger.waiting.values()) + config.batch_timeout_s
        if config.adaptive_batching:
            replicas = [link for version in ledger.complete_versions for link in ledger.replicas(0, version).values()]
            busy_since_s = max((link.silent_since_s for link in replicas if link.in_flight), default=0.0)
            due_s = max(due_s, busy_since_s + config.window * ledger.longest_work_s)
        return due_s

    def _entry_has_room(self) -> bool:
        """Whatever the current version is, and nothing is reserved for suspects."""
        versions = self._ledger.complete_versions
        return bool(versions) and not self._suspects_about and all(self._has_room(version) for version in versions)

    def _entry_idles(self) -> bool:
        """Whatever the current version is, a replica of its first stage has nothing in flight."""
        replicas = (self._ledger.replicas(0, version) for version in self._ledger.complete_versions)
        return all(any(not link.in_flight for link in links.values()) for links in replicas)

    def _has_room(self, version: str) -> bool:
        window = self._config.window
        return any(len(link.in_flight) < window for link in self._ledger.replicas(0, version).values())

    def _may_be_isolated(self, request: RequestEntry) -> bool:
        """A suspect that waits is, unless it was sent back to start again under another version."""
        return request.batch is None and len(self._versions_seen) == 1

    def _has_suspects(self) -> bool:
        """Somebody is isolated, or may be."""
        return self._ledger.isolated_in_flight > 0 or any(
            request.batch is None or request.batch.isolated for request in self._ledger.suspects.values()
        )

    def _batch(self, batch_id: int) -> BatchEntry:
        batch = self._ledger.batches.get(batch_id)
        assert batch is not None, "a batch that does not exist or was forgotten"
        return batch
