"""Asserts that every batch is sent correctly: which requests, to which replica, in which order, how often."""

from __future__ import annotations

from multiworld_serving.server.scheduling.actions import SendBatch
from multiworld_serving.server.scheduling.config import SchedulerConfig
from multiworld_serving.testing.simulation.invariants.reference_model import (
    BatchEntry,
    LinkEntry,
    ReferenceModel,
    RequestEntry,
)


class SendChecker:
    """Part of the `Checker`: invariants of `SendBatch`."""

    def __init__(self, model: ReferenceModel, config: SchedulerConfig) -> None:
        self._model = model
        self._config = config
        self._last_number_batched: dict[str, int] = {}
        """By key."""
        self._rows_sent = 0
        self._hedge_rows_sent = 0

    def check(self, action: SendBatch, now_s: float) -> None:
        """Assert that this batch may be sent to this replica now, and record it in the model."""
        link = self._model.links.get(action.replica)
        assert link is not None, "sent over an unknown link"
        assert not link.draining, "sent over a draining link"
        assert link.stage == action.stage, "sent to the wrong stage"
        assert link.version == action.version, "sent to the wrong version"
        assert len(link.in_flight) < self._config.window, "window exceeded"
        assert not link.suspects, "sent over a link that carries a suspect"
        batch = self._model.batches.get(action.batch) or self._check_new_batch(action, now_s)
        assert tuple(request.id for request in batch.requests) == action.requests, "the requests of a batch changed"
        assert (batch.version, batch.stage, batch.isolated) == (action.version, action.stage, action.isolated)
        assert batch.open, "sent a batch without open requests"
        assert not batch.isolated or not link.in_flight, "a suspect must be alone on its link"
        assert not batch.input_lost, "sent with an input that is lost"
        self._check_kind(action, batch)
        self._check_least_loaded(batch, link, action)
        self._check_reroutes_go_first(action, batch)
        self._model.send(batch, link, now_s)

    def _check_new_batch(self, action: SendBatch, now_s: float) -> BatchEntry:
        assert action.batch > self._model.newest_batch, "a batch id was reused"
        assert action.kind == "first"
        assert action.stage == 0
        assert 1 <= len(action.requests) <= self._config.max_batch_size
        assert action.version == self._model.current_version(), "a new batch is not of the current version"
        requests = tuple(self._model.requests[request] for request in action.requests)
        assert all(request.batch is None for request in requests), "a request in two batches"
        assert all(request.deadline_s > now_s for request in requests), "sent after the deadline"
        key = requests[0].key
        assert all(request.key == key for request in requests), "a batch has requests with different keys"
        self._check_no_key_starves(requests, now_s)
        for request in requests:
            if not request.was_batched:
                assert request.number > self._last_number_batched.get(key, 0), "not in order of arrival"
                self._last_number_batched[key] = request.number
            request.batches += 1
            # One batch, another for each lost input and for the isolation; every further version may cost another.
            limit = 2 + request.inputs_lost
            assert request.batches <= limit or len(self._model.versions_seen) > 1, "a request started again too often"
        if action.isolated:
            assert len(requests) == 1, "a suspect must be alone in its batch"
            assert requests[0].suspect, "isolated a request that is not a suspect"
        return self._model.open_batch(action, requests)

    def _check_no_key_starves(self, requests: tuple[RequestEntry, ...], now_s: float) -> None:
        """Assert that an older request of another key may still wait for its batch to fill."""
        first = requests[0]
        if first.was_batched or self._model.has_suspects():
            return
        older = (each for each in self._model.waiting.values() if each.number < first.number and not each.was_batched)
        if any(each.key != first.key for each in older):
            assert now_s < self._model.batch_due_s(), "passed over an older request of another key that is due"

    def _check_kind(self, action: SendBatch, batch: BatchEntry) -> None:
        rows = len(batch.requests)
        if action.kind == "hedge":
            assert batch.copies, "a hedge without a first copy"
            assert len(batch.copies) < 2, "hedged twice"
            assert action.replica not in batch.copies, "hedged over the same link"
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
            assert batch.failed_on != action.replica, "retried on the link where it failed"
            batch.retries += 1
            assert batch.retries == 1, "retried more than once"

    def _check_least_loaded(self, batch: BatchEntry, link: LinkEntry, action: SendBatch) -> None:
        if self._model.has_suspects():
            return  # a link may be reserved for a suspect, which the model does not track
        window, elsewhere = self._config.window, batch.failed_on if action.kind == "retry" else None
        for other in self._model.replicas(link.stage, link.version).values():
            if other.rows < link.rows and len(other.in_flight) < window and other.id not in batch.copies:
                assert other.id == elsewhere, "not the least loaded replica"

    def _check_reroutes_go_first(self, action: SendBatch, batch: BatchEntry) -> None:
        if action.kind != "first" or batch.isolated:
            return
        for other in self._model.not_in_flight.values():
            # A batch that failed on this link and then lost another one waits for a third link and blocks no other batch.
            rerouted = other.lost and not other.isolated and other.failed_on != action.replica
            same_line = (other.stage, other.version) == (batch.stage, batch.version)
            assert not (rerouted and same_line), f"batch {other.id} lost its link and waits behind a new batch"
