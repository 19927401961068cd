"""Asserts the invariants of the scheduler after every event.

1. Every accepted request gets exactly one answer or rejection, or is cancelled. No closed request is closed again, the rows of an
   answer belong to its own requests, and the scheduler's number of open requests equals that of the model.
2. A request is closed at the latest at its deadline plus one tick: after an event at `now_s` no open request is past its deadline,
   and a wakeup is scheduled before the next deadline, hang timeout, end of a grace period or batch timeout.
3. A batch goes only to a link that is ready, not draining, and of the right stage and version. New batches use the newest complete
   version. Their requests have one key. An output is used once, from the copy that has just returned, in the order of stages.
4. At most `window` batches are in flight per link, as the scheduler counts them. Nothing is kept without a waiting request, and at the
   end nothing is kept.
5. Poison: a request is refused as poison after `max_attempts` broken worlds, the last one broken alone. Suspects are alone on their link,
   and in their batch if they may have broken worlds. A draining link or a link that left blames no request. No request breaks more than
   `max_attempts` + 1 worlds.
6. A stage without replicas keeps its requests for exactly `recovery_grace_s`.
7. A batch is sent again only after a loss, after a failure (once, to another link) or as a hedge (a second copy on another link, never
   of a suspect). Late batches whose input is kept or lost start again. Both stay within `hedge_budget`, without hedges of lost links.
8. A link with batches in flight that is silent for `hang_timeout_s` is broken, and none earlier. A link broken for errors has raised.
   A drained link is closed when it is empty.
9. The scheduler is work-conserving: no batch and no due request waits while a replica that could take it has room.
10. Refusals are correct: the condition of each reason holds in the model.
11. An input that is lost because its holder was removed is never sent again, and its requests start again. A drained link that keeps an
   input is not closed.

In which order replicas, keys and batches are chosen, and the limits of the queue and of back pressure, is tested in
`tests/unit/scheduling`.

The checker maintains its own `ReferenceModel` from events and actions. Of the scheduler it reads only public properties, to compare
them with the model. Unknown causes of broken links and unknown reasons of refusals pass: `check_outcomes` checks which the scenario allows.
"""

from __future__ import annotations

from collections import Counter

from multiworld_serving.server.leader.scheduling.actions import (
    Action,
    Answer,
    FailReplica,
    FreeBatch,
    KeepOutput,
    Reject,
    ReleaseReplica,
    SendBatch,
)
from multiworld_serving.server.leader.scheduling.events import BatchDone, BatchFailed, Event, RequestArrived
from multiworld_serving.server.leader.scheduling.scheduler import Scheduler
from tests.simulation.invariants.reference_model import (
    BatchEntry,
    ReferenceModel,
    RequestEntry,
)

_BURST_BATCHES = 4
"""Full batches that may be hedged at the start."""


class Checker:
    """Observer that raises AssertionError when an invariant is violated."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._config = scheduler.config
        self._model = ReferenceModel(scheduler.config)
        self._rows_sent = self._hedge_rows_sent = 0

    def check(self, event: Event, actions: list[Action], now_s: float, wakeup_s: float | None) -> None:
        """Assert all invariants after this event.

        Args:
            actions: the resulting actions of the scheduler.
            wakeup_s: its `next_wakeup_s()` after the event.
        """
        self._now_s = now_s
        self._wakeup_s = wakeup_s
        self._event = event
        self._output_used = False
        self._returned = self._model.apply(event, now_s)
        for action in actions:
            self._check_action(action)
        self._check_state()

    def check_finished(self) -> None:
        """Assert at the end of a run that nothing is kept."""
        assert not self._model.requests
        assert not self._model.batches
        assert self._scheduler.open_requests == 0
        assert self._scheduler.queue_depth == 0

    # Actions.

    def _check_action(self, action: Action) -> None:
        match action:
            case SendBatch():
                self._check_send(action)
            case KeepOutput():
                self._check_keep_output(action)
            case Answer():
                self._check_answer(action)
            case Reject():
                self._check_refusal(action)
            case FreeBatch():
                batch = self._batch(action.batch)
                if batch.open and batch.copies and not batch.input_lost:  # an output may still come
                    assert batch.holder is not None, "started again with an input that was sent"
                    self._check_budget(batch)
                    batch.input_lost = True
                self._model.drop_batch(batch)
            case FailReplica():
                self._check_break(action)
            case ReleaseReplica():
                link = self._model.links[action.replica]
                assert link.draining
                assert not link.in_flight, "closed a link with batches in flight"
                assert not self._model.holds_inputs(link), "closed a link that keeps the input of a batch"
                self._model.remove_link(link, self._now_s)

    def _check_send(self, action: SendBatch) -> None:
        """Assert that this batch may be sent to this replica now, and record it in the model."""
        link = self._model.links.get(action.replica)
        assert link is not None, "sent over an unknown link"
        assert not link.draining, "sent over a draining link"
        assert link.stage == action.stage, "sent to the wrong stage"
        assert link.version == action.version, "sent to the wrong version"
        assert len(link.in_flight) < self._config.window, "window exceeded"
        assert not link.carries_suspect, "sent over a link that carries a suspect"
        batch = self._model.batches.get(action.batch) or self._check_new_batch(action)
        assert tuple(request.id for request in batch.requests) == action.requests, "the requests of a batch changed"
        assert (batch.version, batch.stage, batch.isolated) == (action.version, action.stage, action.isolated)
        assert batch.open, "sent a batch without open requests"
        assert not batch.isolated or not link.in_flight, "a suspect must be alone on its link"
        assert not batch.input_lost, "sent with an input that is lost"
        self._check_kind(action, batch)
        self._model.send(batch, link, self._now_s)

    def _check_new_batch(self, action: SendBatch) -> BatchEntry:
        assert action.batch > self._model.newest_batch, "a batch id was reused"
        assert action.kind == "first"
        assert action.stage == 0
        assert 1 <= len(action.requests) <= self._config.max_batch_size
        assert [action.version] == self._model.complete_versions[-1:], "a new batch is not of the current version"
        requests = tuple(self._model.requests[request] for request in action.requests)
        assert all(request.batch is None for request in requests), "a request in two batches"
        assert all(request.deadline_s > self._now_s for request in requests), "sent after the deadline"
        key = requests[0].key
        assert all(request.key == key for request in requests), "a batch has requests with different keys"
        for request in requests:
            request.batches += 1
            # One batch, others for its halves, for each lost input and for the isolation; every further version may cost another.
            limit = 2 + (self._config.max_batch_size - 1).bit_length() + request.inputs_lost
            assert request.batches <= limit or len(self._model.versions_seen) > 1, "a request started again too often"
        if action.isolated:
            assert all(request.suspect for request in requests), "isolated a request that is not a suspect"
            breaks = max(request.worlds_broken for request in requests) >= self._config.max_attempts - 1
            assert len(requests) == 1 or not breaks, "a request that breaks worlds must be alone in its batch"
        return self._model.open_batch(action, requests)

    def _check_kind(self, action: SendBatch, batch: BatchEntry) -> None:
        if action.kind == "hedge":
            assert batch.copies, "a hedge without a first copy"
            assert len(batch.copies) < 2, "hedged twice"
            assert action.replica not in batch.copies, "hedged over the same link"
            assert not batch.isolated, "hedged a suspect"
            batch.hedged_link = next(iter(batch.copies))
            self._check_budget(batch)
            return
        self._rows_sent += len(batch.requests)
        assert not batch.copies, "sent again while a copy is in flight"
        if action.kind == "first":
            assert not batch.sent, "sent twice as first"
        elif action.kind == "reroute":
            assert batch.lost, "rerouted without a loss"
        else:
            assert batch.failed_on is not None, "retried without a failure"
            assert batch.failed_on != action.replica, "retried on the link where it failed"
            batch.retries += 1
            assert batch.retries == 1, "retried more than once"

    def _check_budget(self, batch: BatchEntry) -> None:
        """Count a batch that is computed twice because it was late."""
        self._hedge_rows_sent += len(batch.requests)
        budget = self._config.hedge_budget * self._rows_sent + _BURST_BATCHES * self._config.max_batch_size
        assert self._hedge_rows_sent <= budget + self._model.refunded_rows + 1e-6, "hedge budget exceeded"

    def _check_break(self, action: FailReplica) -> None:
        link = self._model.links[action.replica]
        if action.cause == "hang":
            assert link.in_flight, "broke an idle link for a hang"
            assert self._now_s >= link.silent_since_s + self._config.hang_timeout_s, (
                "broke a link before the hang timeout"
            )
        elif action.cause == "error":
            assert link.failures, "broke a link for errors that did not occur"
        self._model.lose_link(link, self._now_s, blames=action.cause != "left")

    def _check_keep_output(self, action: KeepOutput) -> None:
        batch = self._use_output(action.batch, action.replica)
        assert action.stage == batch.stage + 1 < self._config.num_stages
        assert isinstance(self._event, BatchDone)
        self._model.advance(batch, self._model.links[action.replica] if self._event.kept else None)

    def _check_answer(self, action: Answer) -> None:
        batch = self._use_output(action.batch, action.replica)
        assert batch.stage == self._config.num_stages - 1, "answered before the last stage"
        assert action.version == batch.version
        assert [request for request, _ in action.rows] == [request.id for request in batch.open_requests()]
        for request_id, row in action.rows:
            assert batch.requests[row].id == request_id, "the row belongs to another request"
            self._model.close(batch.requests[row])

    def _use_output(self, batch_id: int, link: str) -> BatchEntry:
        """Assert that the output is used once, from the copy that has just returned."""
        batch = self._batch(batch_id)
        assert isinstance(self._event, BatchDone)
        assert batch is self._returned, "used an output that has not arrived"
        assert (self._event.batch, self._event.replica) == (batch_id, link)
        assert not self._output_used, "used an output twice"
        self._output_used = True
        return batch

    def _check_refusal(self, action: Reject) -> None:
        request = self._model.requests.get(action.request)
        assert request is not None, f"refused {action.request} ({action.reason}), which is not open"
        is_new = isinstance(self._event, RequestArrived) and self._event.request == action.request
        assert is_new or action.reason not in ("overloaded", "not_ready")
        assert (action.reason == "overloaded") == (action.retry_after_s is not None)
        self._check_reason(action, request)
        self._model.close(request)

    def _check_reason(self, action: Reject, request: RequestEntry) -> None:
        match action.reason:
            case "deadline":
                assert self._now_s >= request.deadline_s, "refused before the deadline"
            case "no_replica":
                assert self._model.stage_is_lost(request, self._now_s), "refused before the recovery grace ended"
            case "not_ready":
                assert not self._model.was_complete
            case "poison":
                assert request.worlds_broken >= self._config.max_attempts, (
                    "refused as poison after too few broken worlds"
                )
                assert request.broke_alone, "refused as poison without a world broken alone"
            case "stage_error":
                assert isinstance(self._event, BatchFailed)
                assert self._returned is not None
                assert self._returned.isolated, "refused for an error beside other batches"
                assert len(self._returned.requests) == 1, "refused for an error of a shared batch"
                assert request.errors + request.worlds_broken >= 2, "refused at the first error"

    # State after the actions.

    def _check_state(self) -> None:
        model, config, now_s, scheduler = self._model, self._config, self._now_s, self._scheduler
        assert scheduler.open_requests == len(model.requests), "wrong number of open requests"
        self._waiting = model.waiting()
        assert scheduler.queue_depth == len(self._waiting)
        deadline_s = min((request.deadline_s for request in model.requests.values()), default=float("inf"))
        assert deadline_s > now_s, "a deadline was missed"
        silent_since_s = self._check_links()
        hang_s = silent_since_s + config.hang_timeout_s
        assert now_s < hang_s, "a silent link was not broken after the hang timeout"
        self._suspects_present = model.has_suspects()
        assert all(batch.open for batch in model.batches.values()), "a batch without open requests is kept"
        self._not_in_flight = [batch for batch in model.batches.values() if not batch.copies]
        self._check_work_conserving()
        lost_s = float("inf")
        if self._waiting and model.empty_since_s and len(model.versions_seen) == 1:
            lost_s = min(model.empty_since_s.values()) + config.recovery_grace_s
            assert now_s < lost_s, "requests wait for a stage after the recovery grace"
        self._check_wakeup(min(deadline_s, hang_s, lost_s))

    def _check_links(self) -> float:
        """Return the earliest start of silence of all links with batches in flight; infinity if there are none."""
        silent_since_s, in_flight = float("inf"), self._scheduler.in_flight
        for link in self._model.links.values():
            in_flight_count = len(link.in_flight)
            assert in_flight_count == in_flight(link.id), "wrong number of batches in flight"
            if in_flight_count:
                silent_since_s = min(silent_since_s, link.silent_since_s)
            else:
                assert not link.draining or self._model.holds_inputs(link), "a drained link was not closed"
        return silent_since_s

    def _check_wakeup(self, due_s: float) -> None:
        """Assert that the wakeup is in the future and not after the next due time."""
        model, config, wakeup_s = self._model, self._config, self._wakeup_s
        assert wakeup_s is None or wakeup_s > self._now_s, "a wakeup in the past"
        if (
            self._waiting
            and not (self._not_in_flight or self._suspects_present)
            and model.first_stage_has_room(config.window)
        ):
            due_s = min(due_s, model.batch_due_s())
        if due_s < float("inf"):
            assert wakeup_s is not None, "no wakeup although something becomes due"
            assert wakeup_s <= due_s + 1e-9, "the wakeup is after the next due time"

    def _check_work_conserving(self) -> None:
        """Assert that no work waits while a replica could take it."""
        model, config = self._model, self._config
        if self._suspects_present:
            return
        for batch in self._not_in_flight:
            assert not batch.input_lost, f"batch {batch.id} waits without an input"
            replicas = model.replicas(batch.stage, batch.version)
            assert replicas or not model.complete_versions, f"batch {batch.id} is stranded"
            for link in replicas:
                has_room = len(link.in_flight) < config.window and link.id != batch.failed_on
                assert not has_room, f"batch {batch.id} waits while {link.id} has room"
        if self._not_in_flight or not self._waiting or not model.first_stage_has_room(config.window):
            return
        full = (
            max(Counter(request.key for request in self._waiting).values()) >= config.max_batch_size or model.draining
        )
        assert not full, "a full batch waits while the first stage has room"
        assert not (config.adaptive_batching and model.first_stage_has_room(1)), "requests wait while a replica idles"
        assert self._now_s < model.batch_due_s(), "requests wait while the first stage has room"

    def _batch(self, batch_id: int) -> BatchEntry:
        batch = self._model.batches.get(batch_id)
        assert batch is not None, "an unknown or freed batch"
        return batch
