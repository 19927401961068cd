"""The batches at the leader: their inputs, how they are sent to workers, and what becomes of their outputs."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace
from torch import Tensor

from multiworld_serving.common.wire.inputs import BatchInputs
from multiworld_serving.server.leader.metrics import LeaderMetrics
from multiworld_serving.server.leader.pipeline.inputs import batch_input, relayed_bytes, relayed_inputs
from multiworld_serving.server.leader.pipeline.requests import Path, Requests
from multiworld_serving.server.leader.replicas.worker import SentBatch, Worker
from multiworld_serving.server.leader.replicas.worker_link import KeptOutput, WorkerLink
from multiworld_serving.server.leader.scheduling.actions import Answer, KeepOutput, SendBatch
from multiworld_serving.server.leader.scheduling.events import ReplicaId
from multiworld_serving.server.leader.versions.version_table import VersionPlan

logger = logging.getLogger(__name__)

_SENT_AGAIN = {"reroute": "rerouted", "retry": "retried"}


@dataclass(slots=True)
class _Batch:
    """What is stored for a batch.

    Attributes:
        input: of the current stage; None: it could not be stored.
        relay: workers send their outputs to the leader.
        request_ids: the ids of its requests, separated by commas, for the log.
        compute_s, transfer_s: seconds that the batch has spent so far, summed over its stages.
        path, route: names of the worlds and ids of the replicas that computed the stages so far.
    """

    input: BatchInputs | KeptOutput | None
    relay: bool
    request_ids: str
    compute_s: float = 0.0
    transfer_s: float = 0.0
    path: tuple[str, ...] = ()
    route: tuple[ReplicaId, ...] = ()

    def replace(self, following: BatchInputs | KeptOutput | None) -> None:
        """Store the input of the next stage, and release the previous one if a worker keeps it."""
        previous, self.input = self.input, following
        if isinstance(previous, KeptOutput):
            previous.release()


class Batches:
    """
    Args:
        requests: of the rows.

    Attributes:
        replicas: by the scheduler's id.
    """

    def __init__(self, requests: Requests, metrics: LeaderMetrics) -> None:
        self.replicas: dict[ReplicaId, tuple[WorkerLink, VersionPlan]] = {}
        self._requests = requests
        self._metrics = metrics
        self._batches: dict[int, _Batch] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def __contains__(self, number: int) -> bool:
        return number in self._batches

    def computed(self, number: int, compute_s: float, transfer_s: float) -> None:
        """A worker has computed a stage of a batch in this time."""
        if (batch := self._batches.get(number)) is not None:
            batch.compute_s += compute_s
            batch.transfer_s += transfer_s

    def keep(self, action: KeepOutput, take_output: Callable[[], Tensor | KeptOutput]) -> None:
        """The output is the input of the next stage."""
        batch = self._batches[action.batch]
        output = take_output()
        batch.replace(relayed_inputs(output) if isinstance(output, Tensor) else output)
        batch.path += (self._world_of(action.replica),)
        batch.route += (action.replica,)

    def answer(
        self, action: Answer, take_output: Callable[[], Tensor | KeptOutput], current_version: str | None
    ) -> None:
        """The output is that of the last stage."""
        batch = self._batches[action.batch]
        path = Path((*batch.path, self._world_of(action.replica)), (*batch.route, action.replica))
        output, times = take_output(), (batch.compute_s, batch.transfer_s)
        used = self._requests.answer(action, output, times, path, current_version)
        if not used and isinstance(output, KeptOutput):
            output.release()

    def drop_input(self, number: int) -> None:
        """The input of the next stage is not there: the batch cannot be sent."""
        if (batch := self._batches.get(number)) is not None:
            batch.replace(None)

    def free(self, number: int) -> None:
        """The batch has ended."""
        self.drop_input(number)
        self._batches.pop(number, None)

    def _world_of(self, replica: ReplicaId) -> str:
        link, _ = self.replicas[replica]
        return link.worker.id.world

    # -- sending -------------------------------------------------------------------------------------------------------------

    def send(self, action: SendBatch) -> None:
        """Send a batch to a worker."""
        batch = self._batches.get(action.batch)
        if batch is None and action.kind == "first":  # at stage 0, unless its session begins later
            rows, relay, request_ids = self._requests.inputs(action.requests)
            first_input = batch_input(rows)
            batch = self._batches[action.batch] = _Batch(first_input, relay, request_ids)
            self._metrics.relayed_from_frontends.inc(relayed_bytes(first_input))
        if batch is None or batch.input is None:
            raise LookupError(f"there is no input for batch {action.batch}")
        link, plan = self.replicas[action.replica]
        worker = link.worker
        if worker.state != "broken":  # otherwise the scheduler is about to receive `ReplicaLost`
            inputs = batch.input.inputs() if isinstance(batch.input, KeptOutput) else batch.input
            if batch.relay:
                inputs = replace(inputs, keep=False)
            sent = SentBatch(
                *(action.batch, action.stage, plan.number, action.requests, action.replica, time.monotonic()),
                batch.request_ids,
            )
            if self._requests.traced:
                self._requests.trace(sent, action.kind, worker.name, plan.stages[action.stage].spec.blocks[0])
            link.send(sent, inputs)
            if nbytes := relayed_bytes(batch.input):
                self._metrics.link(action.stage, worker.slot.index).sent_bytes.inc(nbytes)
        self._count_sent(action, worker, batch.request_ids)

    def _count_sent(self, action: SendBatch, worker: Worker, request_ids: str) -> None:
        metrics = self._metrics
        if action.kind == "first" and action.stage == 0:
            metrics.batch_size.observe(len(action.requests))
            metrics.queue_s.observe(action.waited_s)
        elif action.kind == "reroute":
            metrics.reroute_s.observe(action.waited_s)
        how = _SENT_AGAIN.get(action.kind, "isolated" if action.isolated and not action.stage else "")
        if how:
            logger.info(
                "batch=%d stage=%d %s to world=%s generation=%d attempt=%d after_s=%.3f request_id=%s",
                *(action.batch, action.stage, how, *worker.id, action.attempt, action.waited_s, request_ids),
            )
