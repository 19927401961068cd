"""A scheduler driver with links to no world, and requests as futures."""

import asyncio
import time
from typing import Any, cast

from torch import Tensor

from multiworld_serving.common.service.predictor import ModelVersion, Prediction
from multiworld_serving.common.wire.inputs import BatchInputs
from multiworld_serving.common.wire.join import JoinRequest
from multiworld_serving.server.leader.metrics import LeaderMetrics
from multiworld_serving.server.leader.pipeline.driver import SchedulerDriver
from multiworld_serving.server.leader.pipeline.inputs import RequestInput
from multiworld_serving.server.leader.pipeline.requests import Outcome, PendingRequest
from multiworld_serving.server.leader.replicas.worker import SentBatch, SlotId, Worker
from multiworld_serving.server.leader.replicas.worker_link import KeptOutput, WorkerLink
from multiworld_serving.server.leader.replicas.worker_link import Outcome as BatchOutcome
from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from multiworld_serving.server.leader.versions.version_table import VersionPlan, VersionTable


def plan_without_stages(number: int = 1) -> VersionPlan:
    """A version for tests that compute nothing."""
    return VersionPlan(ModelVersion(number, f"v{number}"), ())


class Line:
    """A link as the driver sees it: what it was told to send and to release."""

    def __init__(self, slot: SlotId, edge: str = "") -> None:
        request = JoinRequest(f"w{slot.stage}{slot.index}", "cpu", "here", 1, edge=edge)
        self.worker = Worker(request, slot, 1, state="ready")
        self.edge = edge
        self.sent: asyncio.Queue[tuple[SentBatch, BatchInputs]] = asyncio.Queue()
        self.released: list[int] = []

    def send(self, sent: SentBatch, inputs: BatchInputs) -> None:
        self.sent.put_nowait((sent, inputs))

    def release(self, output: int) -> None:
        self.released.append(output)


class DriverBench:
    """A driver with replicas of each stage. With `edges`, workers keep their outputs."""

    def __init__(self, config: SchedulerConfig, replicas: int, *, edges: bool = False) -> None:
        self.metrics, self.plan = LeaderMetrics(), plan_without_stages()
        self.versions = VersionTable(self.plan)
        self.driver = SchedulerDriver("m", config, self.metrics, self.versions, lambda: None)
        slots = [SlotId(stage, index) for stage in range(config.num_stages) for index in range(replicas)]
        self.lines = [Line(slot, f"10.0.0.{slot.stage}{slot.index}:1/w" if edges else "") for slot in slots]
        for line in self.lines:
            self.driver.activate(cast(WorkerLink, line), self.plan)

    def begin(
        self, inputs: RequestInput, rows: int = 1, *, request_id: str = "r", lasts_s: float = 60.0, **fields: Any
    ) -> asyncio.Future[Prediction]:
        """Begin a request. Cancelling the future cancels the request."""
        future: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()

        def set_outcome(outcome: Outcome) -> None:
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        pending = PendingRequest(set_outcome, inputs, request_id, time.monotonic() + lasts_s, **fields)
        future.add_done_callback(lambda done: self.driver.requests.cancel(pending) if done.cancelled() else None)
        self.driver.requests.begin(pending, rows)
        return future

    def report(
        self, line: Line, sent: SentBatch, outcome: BatchOutcome, output: Tensor | KeptOutput | None = None
    ) -> None:
        self.driver.on_batch(line.worker, sent, outcome, output)
