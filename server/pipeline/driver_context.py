"""What the driver needs from the leader, and what it remembers of open requests and of batches in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from multiworld_serving.server.errors import DeadlineError
from multiworld_serving.server.observability.leader_metrics import LeaderMetrics
from multiworld_serving.server.pipeline.batch_tensors import InputRow, KeptOutput
from multiworld_serving.server.pipeline.batch_traces import BatchTraces
from multiworld_serving.server.predictor import KeptRows, ModelVersion, Prediction
from multiworld_serving.server.replicas.worker_link import WorkerLink
from multiworld_serving.server.scheduling.events import ReplicaId
from multiworld_serving.server.versions.version_table import VersionPlan

logger = logging.getLogger(__name__)

_NO_OUTPUT = torch.empty(0)


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
    path: tuple[str, ...]
    batch_size: int


@dataclass(slots=True)
class PendingRequest:
    """A client's request. Each of its samples is a request of the scheduler, with an id of its own."""

    future: asyncio.Future[Prediction]
    rows: Sequence[InputRow]
    """The input of each sample."""
    request_id: str
    arrived_s: float
    deadline_s: float
    key: str
    fetcher: str | None
    """The frontend that fetches the output itself; None: the leader needs it."""
    open: dict[int, int] = field(default_factory=dict)
    """The samples without an outcome, by their ids at the scheduler."""
    parts: list[Part] = field(default_factory=list)

    def prediction(self, model: str, now_s: float) -> Prediction:
        """The answer, when no sample is open any more and one version has computed all."""
        last = slowest = self.parts[-1]
        kept: list[KeptRows] = []
        samples: list[int] = []
        sent: list[Tensor] = []
        for part in self.parts:
            if part.compute_s + part.transfer_s > slowest.compute_s + slowest.transfer_s:
                slowest = part
            if isinstance(part.output, KeptOutput):
                kept.append(part.output.rows_at(part.rows, part.at))
            else:
                samples += part.at
                sent.append(_rows_of(part.output, part.rows))
        output = _NO_OUTPUT if not sent else sent[0] if len(sent) == 1 else torch.cat(sent)
        if samples != sorted(samples):
            output = output[torch.tensor(samples).argsort()]
        return Prediction(
            output=output,
            model=model,
            version=last.version.name,
            version_number=last.version.number,
            queue_s=max(0.0, now_s - self.arrived_s - slowest.compute_s - slowest.transfer_s),
            compute_s=slowest.compute_s,
            transfer_s=slowest.transfer_s,
            attempts=max(last.attempts, slowest.attempts),
            path=last.path,
            batch_size=max(last.batch_size, slowest.batch_size),
            kept=tuple(kept),
        )

    def lose(self, metrics: LeaderMetrics) -> None:
        """The deadline has passed some time ago: report the request as lost if it has no outcome."""
        if not self.future.done():
            metrics.lost.inc()
            logger.error("request_id=%s lost: neither answer nor error by its deadline", self.request_id)
            self.future.set_exception(
                DeadlineError("no answer by the deadline; this is a bug of the server, please report it")
            )


def _rows_of(output: Tensor, rows: tuple[int, ...]) -> Tensor:
    """These rows of a batch, which ascend. Neighbours are a view, not a copy. Raises IndexError."""
    first, end = rows[0], rows[-1] + 1
    if end > len(output):
        raise IndexError(f"row {end - 1} of an output with {len(output)} rows")
    return output[first:end] if end - first == len(rows) else output[list(rows)]


@dataclass(slots=True)
class SentBatch:
    """A batch in flight on one link."""

    sent_s: float
    stage: int
    replica: ReplicaId
    requests: tuple[int, ...]


@dataclass(frozen=True)
class DriverContext:
    """What the driver needs from the leader. `after_event` and `traces` must not raise: see `common.observers`.

    Attributes:
        model: the name of the model.
        find_plan: returns a plan in service by its key in the scheduler.
        find_link: returns the live link with this id.
        on_released: called with the id of a draining replica that has no batches in flight any more.
        after_event: called after every event.
        traces: records the spans of traced requests; None if tracing is off.
    """

    model: str
    find_plan: Callable[[str], VersionPlan]
    find_link: Callable[[str], WorkerLink | None]
    on_released: Callable[[str], None]
    after_event: Callable[[], None]
    traces: BatchTraces | None = None
