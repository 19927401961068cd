"""The batches at the leader: their inputs, how they are sent to workers, and what becomes of their outputs."""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from msgspec.structs import replace
from torch import Tensor

from multiworld_serving.common.wire.inputs import BatchInputs
from multiworld_serving.server.leader.metrics import LeaderMetrics
from multiworld_serving.server.leader.pipeline.inputs import batch_input, relayed_bytes, relayed_inputs
from multiworld_serving.server.leader.pipeline.requests import Requests
from multiworld_serving.server.leader.replicas.worker import SentBatch, Worker
from multiworld_serving.server.leader.replicas.worker_link import KeptOutput, WorkerLink
from multiworld_serving.server.leader.scheduling.actions import Answer, KeepOutput, SendBatch
from multiworld_serving.server.leader.scheduling.events import InputLost, ReplicaId
from multiworld_serving.server.leader.versions.version_table import VersionPlan

logger = logging.getLogger(__name__)

_MAX_HOLDERS = 10_000
"""Producers that a consumer cannot reach."""
_UNCLAIMED_S = 10.0
"""How long a worker keeps the output of the last stage for frontends that do not fetch it."""


class Relays:
    """Their tensors pass the leader until one of the two joins again.

    A consumer opens its edge to a producer with the first fetch. If that fails, the leader relays between the two from then on.
    """

    def __init__(self) -> None:
        self._consumers: dict[str, set[str]] = {}
        """By producer, the names of the consumers that cannot reach it. No value is empty."""

    def add(self, holder: str, consumer: str) -> None:
        """This consumer could not fetch from the producer."""
        if len(self._consumers) >= _MAX_HOLDERS:  # a process that ended before its consumer reported it stays here
            del self._consumers[next(iter(self._consumers))]
        self._consumers.setdefault(holder, set()).add(consumer)

    def forget(self, holder: str, consumer: str) -> None:
        """A process has ended, or its link: it was known by these names as a producer and a consumer."""
        self._consumers.pop(holder, None)
        for each in [each for each, consumers in self._consumers.items() if consumer in consumers]:
            self._consumers[each].discard(consumer)
            if not self._consumers[each]:
                del self._consumers[each]

    def between(self, holder: str, consumer: str) -> bool:
        """Whether tensors of this producer pass the leader on their way to this consumer."""
        return consumer in self._consumers.get(holder, ())

    def needed_from(self, holder: str) -> bool:
        """Whether a consumer cannot reach this producer."""
        return holder in self._consumers


@dataclass(slots=True)
class _Batch:
    """What is stored for a batch.

    Attributes:
        input: of the current stage; None: it could not be stored.
        compute_s, transfer_s: seconds that the batch has spent so far, summed over its stages.
        path: names of the worlds that computed the stages so far.
    """

    input: BatchInputs | KeptOutput | None
    compute_s: float = 0.0
    transfer_s: float = 0.0
    path: tuple[str, ...] = ()

    def replace(self, following: BatchInputs | KeptOutput | None) -> None:
        """Store the input of the next stage, and release the previous one if a worker keeps it."""
        previous, self.input = self.input, following
        if isinstance(previous, KeptOutput):
            previous.release()

    @property
    def holders(self) -> frozenset[str]:
        """The producers of the input."""
        if isinstance(self.input, KeptOutput):
            return frozenset((self.input.holder,))
        return (
            frozenset(each.holder for each in self.input.sources)
            if isinstance(self.input, BatchInputs)
            else frozenset()
        )


class Batches:
    """
    Args:
        requests: of the rows.
        submit: hands an event to the scheduler.

    Attributes:
        relays: who cannot reach whom.
        replicas: by the scheduler's id.
    """

    def __init__(
        self,
        num_stages: int,
        requests: Requests,
        metrics: LeaderMetrics,
        submit: Callable[[InputLost], None],
    ) -> None:
        self.relays = Relays()
        self.replicas: dict[ReplicaId, tuple[WorkerLink, VersionPlan]] = {}
        self._num_stages = num_stages
        self._requests = requests
        self._metrics = metrics
        self._submit = submit
        self._batches: dict[int, _Batch] = {}

    def __len__(self) -> int:
        return len(self._batches)

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

    def answer(
        self, action: Answer, take_output: Callable[[], Tensor | KeptOutput], current_version: str | None
    ) -> None:
        """The output is that of the last stage."""
        batch = self._batches[action.batch]
        path = (*batch.path, self._world_of(action.replica))
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

    def is_kept_at(self, number: int, holders: Collection[str]) -> bool:
        """Whether the input of the batch is the output of one of these workers."""
        batch = self._batches.get(number)
        return batch is not None and isinstance(batch.input, KeptOutput) and batch.input.holder in holders

    def lose_input(self, batch: int, replica: ReplicaId, requests: tuple[int, ...], holders: Collection[str]) -> None:
        """Hand the requests whose inputs are at `holders` back to their frontends. The others of the batch start again."""
        self._requests.hand_back(requests, holders)
        self._metrics.inputs_lost.inc()
        self._submit(InputLost(batch, replica))

    def _world_of(self, replica: ReplicaId) -> str:
        link, _ = self.replicas[replica]
        return link.worker.id.world

    # -- sending -------------------------------------------------------------------------------------------------------------

    def send(self, action: SendBatch) -> None:
        """Send a batch to a worker, or report that its input is lost."""
        batch = self._batches.get(action.batch)
        if batch is None and action.stage == 0:
            batch = self._batches[action.batch] = _Batch(batch_input(self._requests.rows(action.requests)))
        if batch is None or batch.input is None:
            raise LookupError(f"there is no input for batch {action.batch}")
        link, plan = self.replicas[action.replica]
        worker = link.worker
        if holders := [holder for holder in batch.holders if self.relays.between(holder, worker.name)]:
            self.lose_input(action.batch, action.replica, action.requests, holders)
            return
        if worker.state != "broken":  # otherwise the scheduler is about to receive `ReplicaLost`
            sent = SentBatch(action.batch, action.stage, plan.number, action.requests, action.replica, time.monotonic())
            link.send(sent, self._inputs(action, batch.input, worker))
            if nbytes := relayed_bytes(batch.input):
                self._metrics.link(action.stage, worker.slot.index).sent_bytes.inc(nbytes)
        self._count_sent(action, worker)

    def _inputs(self, action: SendBatch, stored: BatchInputs | KeptOutput, worker: Worker) -> BatchInputs:
        """What the worker receives: the input, or where it fetches it, and whether it keeps the output."""
        is_last = action.stage + 1 == self._num_stages
        keep = self._keeps_output(action, worker.request.edge, is_last=is_last)
        inputs = stored.inputs() if isinstance(stored, KeptOutput) else stored
        return replace(inputs, keep=keep, expires_s=_UNCLAIMED_S if is_last else 0.0)

    def _keeps_output(self, action: SendBatch, holder: str, *, is_last: bool) -> bool:
        """Whether the worker should keep the output, because everyone who needs it can fetch it."""
        if not is_last:
            return not self.relays.needed_from(holder)
        fetchers = self._requests.fetchers(action.requests)
        return all(fetcher is not None and not self.relays.between(holder, fetcher) for fetcher in fetchers)

    def _count_sent(self, action: SendBatch, worker: Worker) -> None:
        metrics = self._metrics
        if action.kind == "first" and action.stage == 0:
            metrics.batch_size.observe(len(action.requests))
            metrics.queue_s.observe(action.waited_s)
        elif action.kind == "reroute":
            metrics.reroute_s.observe(action.waited_s)
            logger.info(
                "batch=%d stage=%d rerouted to world=%s generation=%d attempt=%d after_s=%.3f",
                *(action.batch, action.stage, *worker.id, action.attempt, action.waited_s),
            )
