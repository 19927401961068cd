"""The clients' requests at the leader, until they have an outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from multiworld_serving.common.service.errors import (
    DeadlineError,
    DrainingError,
    RequestRejected,
    StageError,
)
from multiworld_serving.common.service.predictor import ModelVersion, Prediction, StageAttempt, Trace
from multiworld_serving.common.wire.inputs import RowsLostError, Source, joined_rows
from multiworld_serving.server.leader.metrics import LeaderMetrics
from multiworld_serving.server.leader.pipeline.inputs import RequestInput, rows_of
from multiworld_serving.server.leader.replicas.worker import SentBatch
from multiworld_serving.server.leader.replicas.worker_link import KeptOutput
from multiworld_serving.server.leader.scheduling.actions import Answer, Reject
from multiworld_serving.server.leader.scheduling.events import ReplicaId, RequestArrived, RequestCancelled
from multiworld_serving.server.leader.versions.version_table import VersionTable

logger = logging.getLogger(__name__)

NO_OUTPUT = torch.empty(0)
"""The output of a prediction whose rows are all kept by workers."""
_FREQUENT = ("overloaded", "deadline", "no_replica", "not_ready")
"""Reasons for which a busy leader rejects thousands of requests per second. Frontends log a part of them."""
_LOST_AFTER_S = 0.5
"""A request without an outcome this long after its deadline is lost."""


class Path(NamedTuple):
    """The worlds and the replicas that have computed the stages of a batch."""

    worlds: tuple[str, ...]
    replicas: tuple[ReplicaId, ...]


class Part(NamedTuple):
    """Samples of a request that one batch answered."""

    at: tuple[int, ...]
    """Which samples of the request."""
    rows: tuple[int, ...]
    """The row of the output for each of them."""
    output: Tensor | KeptOutput
    version: ModelVersion
    compute_s: float
    transfer_s: float
    attempts: int
    path: Path
    batch_size: int


Outcome: TypeAlias = Prediction | Exception


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request of a client. Each of its samples is a request of the scheduler, with an id of its own.

    Attributes:
        on_outcome: called once, with the prediction or the reason why there is none; not after `Requests.cancel`. Must not raise.
        key: requests with equal keys can be computed together.
        relay: all tensors of the request pass this leader. It shares batches only with other relayed requests, so that none of them has
            an input that a worker must fetch.
        route: the replicas that keep its session.
        open: the samples without an outcome, by their ids at the scheduler.
        trace: None = it is not traced.
    """

    on_outcome: Callable[[Outcome], None]
    input: RequestInput
    request_id: str
    deadline_s: float
    key: str = ""
    relay: bool = False
    route: tuple[ReplicaId, ...] = ()
    arrived_s: float = field(default_factory=time.monotonic)
    ended: bool = False
    open: dict[int, int] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    trace: Trace | None = None

    def prediction(self, model: str, now_s: float) -> Prediction:
        """The answer, when no sample is open any more and one version has computed all."""
        last = slowest = self.parts[-1]
        kept: list[Source] = []
        sent: list[Tensor] = []
        samples: list[int] = []
        row_bytes = 0
        for part in self.parts:
            if part.compute_s + part.transfer_s > slowest.compute_s + slowest.transfer_s:
                slowest = part
            if isinstance(part.output, KeptOutput):
                kept.append(part.output.rows_at(part.rows, part.at))
                row_bytes = max(row_bytes, part.output.row_bytes)
            else:
                samples += part.at
                sent.append(rows_of(part.output, part.rows))
        output = joined_rows(sent) if sent else NO_OUTPUT
        if row_bytes and output.dim() == 2:
            row_bytes = max(row_bytes, output.shape[1])
        if samples != sorted(samples):
            output = output[torch.tensor(samples).argsort()]
        return Prediction(
            output=output,
            model=model,
            version=last.version.name,
            version_number=last.version.number,
            version_digest=last.version.digest,
            queue_s=max(0.0, now_s - self.arrived_s - slowest.compute_s - slowest.transfer_s),
            compute_s=slowest.compute_s,
            transfer_s=slowest.transfer_s,
            attempts=max(last.attempts, slowest.attempts),
            path=last.path.worlds,
            route=last.path.replicas,
            batch_size=max(last.batch_size, slowest.batch_size),
            kept=tuple(kept),
            row_bytes=row_bytes,
            trace=self.trace,
        )


class Requests:
    """All requests without an outcome. Each of their samples is a request of the scheduler.

    Args:
        arrive, submit: hand an event to the scheduler.

    Attributes:
        has_begun: whether there has been a request.
        pending: by the id of each sample that has no outcome.
        traced: the traced requests that have no outcome.
    """

    def __init__(
        self,
        model: str,
        metrics: LeaderMetrics,
        versions: VersionTable,
        arrive: Callable[[RequestArrived], None],
        submit: Callable[[RequestCancelled], None],
    ) -> None:
        self._model = model
        self._metrics = metrics
        self._versions = versions
        self._arrive = arrive
        self._submit = submit
        self._next_id = 0
        self.has_begun = False
        self.pending: dict[int, PendingRequest] = {}
        self.traced: set[PendingRequest] = set()
        self._idle = asyncio.Event()

    async def wait_idle(self) -> None:
        """Wait until all requests have an outcome."""
        while self.pending:
            self._idle.clear()
            await self._idle.wait()

    def close(self) -> None:
        """End all requests with `DrainingError`."""
        for pending in set(self.pending.values()):
            self._end(pending, DrainingError("the server has stopped; send the request again"))

    def begin(self, pending: PendingRequest, rows: int) -> None:
        """Compute a request of this many samples."""
        self.has_begun = True
        if pending.trace is not None:
            self.traced.add(pending)
        self._submit_samples(pending, range(rows))

    def cancel(self, pending: PendingRequest) -> None:
        """Nobody needs the outcome of this request any more."""
        pending.ended = True
        self._withdraw(pending)

    def report_lost(self) -> None:
        """End the requests that should have had an outcome some time ago. The scheduler must never let that happen."""
        due_s = time.monotonic() - _LOST_AFTER_S
        for pending in {each for each in self.pending.values() if each.deadline_s < due_s}:
            self._metrics.lost.inc()
            logger.error("request_id=%s lost: neither answer nor error by its deadline", pending.request_id)
            error = DeadlineError("no answer by the deadline; this is a bug of the server, please report it")
            self._end(pending, error)

    def inputs(self, requests: Sequence[int]) -> tuple[list[tuple[RequestInput, int] | None], bool, str]:
        """What a batch of these samples consists of.

        Returns:
            The input of each sample and its row there, None if it has its outcome; whether all tensors pass this leader; and the ids of the
            requests, separated by commas.
        """
        found = [(self.pending.get(request), request) for request in requests]
        rows = [None if pending is None else (pending.input, pending.open[request]) for pending, request in found]
        present = [pending for pending, _ in found if pending is not None]
        request_ids = ",".join(dict.fromkeys([pending.request_id for pending in present]))
        return rows, any(pending.relay for pending in present), request_ids

    def trace(self, sent: SentBatch, kind: str, worker: str, name: str) -> None:
        """Add a batch that is about to be sent to a stage of this name to the traces of its requests."""
        rows = len(sent.requests)
        sent.attempt = StageAttempt(
            sent.batch, sent.stage, rows, kind, sent.replica, worker, sent.sent_s, stage_name=name
        )
        for pending in {self.pending.get(request) for request in sent.requests}:
            if pending is not None and pending.trace is not None:
                pending.trace.attempts.append(sent.attempt)

    def lose_input(self, requests: Sequence[int], why: str) -> None:
        """End the requests of these samples with `RowsLostError`: their frontends send them again, relayed."""
        for pending in filter(None, map(self.pending.get, requests)):
            self._end(pending, RowsLostError(why))

    def answer(
        self,
        action: Answer,
        output: Tensor | KeptOutput,
        times: tuple[float, float],
        path: Path,
        current_version: str | None,
    ) -> bool:
        """Add the output to the requests of its rows, and end those without an open sample.

        Returns:
            Whether a request has taken a row.
        """
        found: dict[PendingRequest, list[tuple[int, int]]] = {}
        for request, row in action.rows:
            pending = self.pending.pop(request, None)
            if pending is None:
                self._metrics.duplicates.inc()
            else:
                found.setdefault(pending, []).append((pending.open.pop(request), row))
        if not self.pending:
            self._idle.set()
        version = self._versions.plan(action.version).version
        for pending, taken in found.items():
            samples, rows = zip(*taken, strict=True)
            part = Part(samples, rows, output, version, *times, action.attempts, path, len(action.rows))
            pending.parts.append(part)
            if not pending.open:
                try:
                    self._finish(pending, current_version)
                except Exception as error:
                    logger.exception("request_id=%s cannot be answered", pending.request_id)
                    self._end(pending, _failure_of_leader(error))
        return bool(found)

    def reject(self, action: Reject) -> None:
        """End a request with the scheduler's reason."""
        if (pending := self.pending.get(action.request)) is not None:
            level = logging.DEBUG if action.reason in _FREQUENT else logging.INFO
            logger.log(level, "request_id=%s rejected reason=%s %s", pending.request_id, action.reason, action.detail)
            self._close(action.request)
            error = RequestRejected.for_reason(action.reason, action.detail, retry_after_s=action.retry_after_s)
            self._end(pending, error)

    def leader_failed(self, request: int, error: Exception) -> None:
        """End the request of this sample with an error, because the leader itself failed."""
        if (pending := self.pending.get(request)) is not None:
            self._end(pending, _failure_of_leader(error))

    def _submit_samples(self, pending: PendingRequest, samples: Sequence[int]) -> None:
        """Hand samples of a request to the scheduler, each with a new id."""
        first, self._next_id = self._next_id, self._next_id + len(samples)
        for request, at in enumerate(samples, first):
            pending.open[request] = at
            self.pending[request] = pending
        key = f"relay {pending.key}" if pending.relay else pending.key
        self._arrive(RequestArrived(first, pending.deadline_s, key, len(samples), pending.route))

    def _finish(self, pending: PendingRequest, current: str | None) -> None:
        """All samples are computed: answer, or compute those of a former version again."""
        parts = pending.parts
        if len(parts) == 1 or all(part.version == parts[0].version for part in parts):
            self._end(pending, pending.prediction(self._model, time.monotonic()))
            return
        version = parts[-1].version if current is None else self._versions.plan(current).version
        stale = [at for part in parts if part.version != version for at in part.at]
        pending.parts = [part for part in parts if part.version == version]
        self._submit_samples(pending, sorted(stale))

    def _end(self, pending: PendingRequest, outcome: Outcome) -> None:
        if not pending.ended:
            pending.ended = True
            if isinstance(outcome, RequestRejected):
                outcome.trace = pending.trace
            pending.on_outcome(outcome)
        self._withdraw(pending)

    def _withdraw(self, pending: PendingRequest) -> None:
        """Cancel the samples without an outcome."""
        self.traced.discard(pending)
        for request in tuple(pending.open):
            self._close(request)
            self._submit(RequestCancelled(request))

    def _close(self, request: int) -> None:
        """Forget a sample that has its outcome."""
        if (pending := self.pending.pop(request, None)) is not None:
            del pending.open[request]
        if not self.pending:
            self._idle.set()


def _failure_of_leader(error: Exception) -> StageError:
    return StageError(f"the leader failed: {type(error).__name__}: {error}")
