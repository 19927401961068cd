"""What the driver needs from the leader, and what it remembers of open requests and of batches in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from multiworld_serving.server.errors import DeadlineError
from multiworld_serving.server.observability.leader_metrics import LeaderMetrics
from multiworld_serving.server.pipeline.batch_traces import BatchTraces
from multiworld_serving.server.predictor import Prediction
from multiworld_serving.server.replicas.worker_link import WorkerLink
from multiworld_serving.server.scheduling.events import ReplicaId
from multiworld_serving.server.versions.version_table import VersionPlan

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PendingRequest:
    """A request whose caller waits for the outcome."""

    future: asyncio.Future[Prediction]
    request_id: str
    arrived_s: float
    fetcher: str | None
    """The frontend that fetches the output itself; None: the leader needs it."""

    def lose(self, metrics: LeaderMetrics) -> None:
        """The deadline has passed some time ago: report the request as lost if it has no outcome."""
        if not self.future.done():
            metrics.lost.inc()
            logger.error("request_id=%s lost: neither answer nor error by its deadline", self.request_id)
            self.future.set_exception(
                DeadlineError("no answer by the deadline; this is a bug of the server, please report it")
            )


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
