"""Connects the pure scheduler to the event loop: submits events, performs actions, sets the timer.

The scheduler decides; the driver holds the tensors, the clock and the futures. Everything runs on one event loop.
"""

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from msgspec.structs import replace
from torch import Tensor

from multiworld import Cause
from multiworld_serving.common.wire.inputs import BatchInputs, LostInput
from multiworld_serving.common.wire.message import Message, MessageKind
from multiworld_serving.server.observability.leader_metrics import LeaderMetrics
from multiworld_serving.server.pipeline.batch_traces import BatchTraces
from multiworld_serving.server.pipeline.inputs import (
    KeptOutput,
    batch_input,
    relayed_bytes,
    relayed_inputs,
)
from multiworld_serving.server.pipeline.relays import Relays
from multiworld_serving.server.pipeline.requests import Requests
from multiworld_serving.server.replicas.worker import SentBatch, Worker
from multiworld_serving.server.replicas.worker_link import WorkerLink
from multiworld_serving.server.scheduling.actions import (
    Action,
    Answer,
    FailReplica,
    FreeBatch,
    KeepOutput,
    Reject,
    ReleaseReplica,
    SendBatch,
)
from multiworld_serving.server.scheduling.config import SchedulerConfig
from multiworld_serving.server.scheduling.events import (
    BatchDone,
    BatchFailed,
    Events,
    InputLost,
    ReplicaDraining,
    ReplicaId,
    ReplicaLost,
    ReplicaReady,
    RequestArrived,
    Tick,
)
from multiworld_serving.server.scheduling.scheduler import Scheduler
from multiworld_serving.server.versions.version_table import VersionPlan, VersionTable

logger = logging.getLogger(__name__)

_UNCLAIMED_S = 10.0
"""How long a worker keeps the output of the last stage for frontends that do not fetch it."""
_CAUSED_BY_INPUT = re.compile(r"\bindex\b.* out of (range|bounds)")
"""In the errors of torch's operators for an index that the model does not have, such as a number of a word."""
_WHY_BROKEN = {
    "hang": "no answer within hang_timeout_s",
    "error": "batches that fail there succeed elsewhere",
}
"""Explanation of the cause of a `FailReplica`."""


@dataclass(slots=True)
class _Batch:
    """What is stored for a batch.

    Attributes:
        input: of the current stage; None: it could not be stored.
        compute_s, transfer_s: seconds that the batch has spent so far, summed over its stages.
        path: names of the worlds that computed the stages so far.
    """

    input: Tensor | BatchInputs | KeptOutput | None
    compute_s: float = 0.0
    transfer_s: float = 0.0
    path: tuple[str, ...] = ()

    def replace(self, following: Tensor | KeptOutput | None) -> None:
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


class SchedulerDriver:
    """Owns the scheduler, and the inputs of batches.

    Args:
        model: the name of the model.
        after_event: called after every event. Must not raise: see `common.observers`.
        traces: records the spans of traced requests; None if tracing is off.

    Attributes:
        released: draining replicas that have no batches in flight any more. `after_event` removes them.
        relays: who cannot reach whom.
        requests: of clients.
    """

    def __init__(
        self,
        model: str,
        config: SchedulerConfig,
        metrics: LeaderMetrics,
        versions: VersionTable,
        after_event: Callable[[], None],
        traces: BatchTraces | None = None,
    ) -> None:
        self.scheduler = Scheduler(config)
        self.relays = Relays()
        self.requests = Requests(model, metrics, versions, self._arrive, self.submit_event)
        self.released: list[tuple[Worker, int]] = []
        self._metrics = metrics
        self._after_event = after_event
        self._traces = traces
        self._replicas: dict[ReplicaId, tuple[WorkerLink, VersionPlan]] = {}
        self._batches: dict[int, _Batch] = {}
        self._events: deque[tuple[Events, Tensor | KeptOutput | None]] = deque()
        """Each with the output of its batch."""
        self._current: tuple[Events, Tensor | KeptOutput | None] | None = None
        """The event that is being handled. An output that is still here afterwards is released."""
        self._arrivals: list[RequestArrived] = []
        """Of this turn of the event loop."""
        self._timer: tuple[float, asyncio.TimerHandle] | None = None
        """When it fires, as `time.monotonic()`."""

    def close(self) -> None:
        """Stop the timer and end all pending requests with `DrainingError`."""
        if self._timer is not None:
            self._timer[1].cancel()
        self.requests.close()

    # -- workers -------------------------------------------------------------------------------------------------------------

    def activate(self, link: WorkerLink, plan: VersionPlan) -> None:
        """Send batches of this version to the worker from now on."""
        worker, replica = link.worker, link.worker.replica(plan.number)
        worker.replicas[plan.number] = True
        self._replicas[replica] = link, plan
        self.submit_event(ReplicaReady(replica, worker.stage, plan.key))

    def drain(self, link: WorkerLink, version: int) -> None:
        """Send no new batches of this version. When the worker has none in flight, the replica is in `released`."""
        link.worker.replicas[version] = False
        self.submit_event(ReplicaDraining(link.worker.replica(version)))

    def remove(self, link: WorkerLink) -> None:
        """The link has ended: its batches in flight will not return."""
        worker = link.worker
        for replica in list(map(worker.replica, worker.replicas)):
            self.submit_event(ReplicaLost(replica, worker.ending.cause if worker.ending else ""))
            self._replicas.pop(replica, None)
        worker.replicas.clear()
        if worker.request.edge:
            self.relays.forget(worker.request.edge, worker.name)
        if self._traces is not None:
            self._traces.link_ended(worker)

    def in_flight(self, worker: Worker) -> int:
        """Batches in flight at this worker."""
        return sum(self.scheduler.in_flight(worker.replica(version)) for version in worker.replicas)

    def on_batch(self, link: WorkerLink, message: Message, sent: SentBatch) -> None:
        """A message about a batch in flight at a worker, which has been checked. Raises WireError."""
        if message.kind is MessageKind.FAILED:
            self._on_failed(link.worker, sent, message.reason())
        elif message.kind is MessageKind.INPUT_LOST:
            self._on_input_lost(link.worker, sent, LostInput.from_json(message.text()))
        else:
            self._on_result(link, message, sent)

    def _on_result(self, link: WorkerLink, message: Message, sent: SentBatch) -> None:
        assert message.payload is not None, "the link has checked it"
        worker, kept = link.worker, message.kind is MessageKind.KEPT
        output: Tensor | KeptOutput = message.payload
        if kept:
            tensor, row_shape = link.kept(message, sent)
            output = KeptOutput(link, tensor, len(sent.requests), row_shape)
        # The times reported by a worker are not trusted: limit them to the time since the batch was sent.
        took_s = time.monotonic() - sent.sent_s
        compute_s = min(message.compute_ns / 1e9, took_s)
        waited_s = min(message.waited_us / 1e6, took_s - compute_s)
        transfer_s = took_s - compute_s - waited_s
        of_slot, nbytes = self._metrics.link(sent.stage, worker.slot.index), relayed_bytes(output)
        of_slot.compute_s.observe(compute_s)
        of_slot.transfer_s.observe(transfer_s)
        if nbytes:
            of_slot.received_bytes.inc(nbytes)
            self._metrics.relayed_from_workers.inc(nbytes)
        if self._traces is not None:
            self._traces.answered(sent.batch, worker, compute_s, waited_s, transfer_s)
        if (batch := self._batches.get(sent.batch)) is not None:
            batch.compute_s += compute_s
            batch.transfer_s += transfer_s
        self.submit_event(BatchDone(sent.batch, sent.replica, compute_s, transfer_s, kept), output)

    def _on_input_lost(self, worker: Worker, sent: SentBatch, lost: LostInput) -> None:
        logger.warning("world=%s batch=%d the input is lost: %s", worker.id.world, sent.batch, lost.detail)
        if self._traces is not None:
            self._traces.failed(sent.batch, worker, "the input is lost")
        batch = self._batches.get(sent.batch)
        keeps_nothing = batch is not None and isinstance(batch.input, KeptOutput) and batch.input.holder in lost.holders
        # A worker that does not have the output that it must have is relayed too.
        for holder in lost.holders if keeps_nothing else lost.unreachable:
            self.relays.add(holder, worker.name)
        self._lose_input(sent.batch, sent.replica, sent.requests, lost.holders)

    def _lose_input(self, batch: int, replica: ReplicaId, requests: tuple[int, ...], holders: Collection[str]) -> None:
        """Hand the requests whose inputs are at `holders` back to their frontends. The others of the batch start again."""
        self.requests.hand_back(requests, holders)
        self._metrics.inputs_lost.inc()
        self.submit_event(InputLost(batch, replica))

    def _on_failed(self, worker: Worker, sent: SentBatch, error: str) -> None:
        logger.warning("world=%s generation=%d batch=%d failed: %s", *worker.id, sent.batch, error)
        if self._traces is not None:
            self._traces.failed(sent.batch, worker, error)
        self.submit_event(BatchFailed(sent.batch, sent.replica, error, by_input=bool(_CAUSED_BY_INPUT.search(error))))

    # -- events and actions of the scheduler ---------------------------------------------------------------------------------

    def _arrive(self, event: RequestArrived) -> None:
        """Submit an arrival, together with all others of this turn of the event loop."""
        self._arrivals.append(event)
        if len(self._arrivals) == 1:
            asyncio.get_running_loop().call_soon(self._submit_arrivals)

    def _submit_arrivals(self) -> None:
        arrived, self._arrivals = [each for each in self._arrivals if each.request in self.requests.pending], []
        if arrived:
            self.submit_event(arrived)

    def submit_event(self, event: Events, output: Tensor | KeptOutput | None = None) -> None:
        """Submit an event to the scheduler, perform its actions, and set the timer.

        Actions may submit further events; these are handled after all actions of the current event. An event or action that raises
        does not stop the others, and the timer is set in any case.

        Args:
            output: for `BatchDone`: the output tensor, or where it is kept.
        """
        self._events.append((event, output))
        if self._current is not None:
            return
        try:
            while self._events:
                self._current = self._events.popleft()
                for action in self._decide(self._current[0]):
                    self._try_perform(action)
                if isinstance(unused := self._current[1], KeptOutput):
                    unused.release()
        finally:
            self._current = None
            self._wake_at(self.scheduler.next_wakeup_s())
        self._after_event()

    def _decide(self, event: Events) -> list[Action]:
        try:
            return self.scheduler.handle(event, time.monotonic())
        except Exception as error:
            logger.exception("the scheduler failed on %s; this is a bug, please report it", type(event).__name__)
            if isinstance(event, list):
                for each in event:
                    self.requests.leader_failed(each.request, error)
            return []

    def _try_perform(self, action: Action) -> None:
        """Perform an action. If it raises, end or retry the requests that depend on it."""
        try:
            self._perform(action)
        except Exception as error:
            logger.exception("%s failed", type(action).__name__)
            match action:
                case SendBatch():
                    self._not_sent(action, error)
                case KeepOutput():
                    if (batch := self._batches.get(action.batch)) is not None:
                        batch.replace(None)  # otherwise the next stage would get the input of this stage
                case Answer():
                    for request, _ in action.rows:
                        self.requests.leader_failed(request, error)
                case Reject():
                    self.requests.leader_failed(action.request, error)

    def _not_sent(self, action: SendBatch, error: Exception) -> None:
        if self._traces is not None and (found := self._replicas.get(action.replica)):
            self._traces.failed(action.batch, found[0].worker, "the batch was not sent")
        self.submit_event(BatchFailed(action.batch, action.replica, f"{type(error).__name__}: {error}", sent=False))

    def _wake_at(self, wakeup_s: float | None) -> None:
        """Set the timer. One that fires earlier is left as it is: its `Tick` sets the next one."""
        if wakeup_s is None or (self._timer is not None and self._timer[0] <= wakeup_s):
            return
        if self._timer is not None:
            self._timer[1].cancel()
        delay_s = max(0.0, wakeup_s - time.monotonic())
        self._timer = wakeup_s, asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.submit_event(Tick())

    def _perform(self, action: Action) -> None:
        match action:
            case SendBatch():
                self._send(action)
            case KeepOutput():
                self._keep(action)
            case Answer():
                self._answer(action)
            case Reject():
                self.requests.reject(action)
            case FreeBatch():
                if (batch := self._batches.pop(action.batch, None)) is not None:
                    batch.replace(None)
            case FailReplica():
                if found := self._replicas.get(action.replica):
                    found[0].fail(Cause(action.cause), _WHY_BROKEN[action.cause])
            case ReleaseReplica():
                if found := self._replicas.pop(action.replica, None):
                    self.released.append((found[0].worker, found[1].number))

    def _take_output(self) -> Tensor | KeptOutput:
        """The output of the batch whose event is being handled. It is released if nothing takes it."""
        event, output = self._current or (None, None)
        assert event is not None
        assert output is not None, "only BatchDone has an output, and one action takes it"
        self._current = event, None
        return output

    def _keep(self, action: KeepOutput) -> None:
        batch = self._batches[action.batch]
        batch.replace(self._take_output())
        batch.path += (self._world_of(action.replica),)

    def _world_of(self, replica: ReplicaId) -> str:
        link, _ = self._replicas[replica]
        return link.worker.id.world

    def _answer(self, action: Answer) -> None:
        batch = self._batches[action.batch]
        path = (*batch.path, self._world_of(action.replica))
        output, times = self._take_output(), (batch.compute_s, batch.transfer_s)
        used = self.requests.answer(action, output, times, path, self.scheduler.current_version)
        if not used and isinstance(output, KeptOutput):
            output.release()

    # -- sending -------------------------------------------------------------------------------------------------------------

    def _send(self, action: SendBatch) -> None:
        batch = self._batches.get(action.batch)
        if batch is None and action.stage == 0:
            batch = self._batches[action.batch] = _Batch(batch_input(self.requests.rows(action.requests)))
        if batch is None or batch.input is None:
            raise LookupError(f"there is no input for batch {action.batch}")
        link, plan = self._replicas[action.replica]
        worker = link.worker
        if not worker.request.edge:
            for holder in batch.holders:
                self.relays.add(holder, worker.name)
        if holders := [holder for holder in batch.holders if self.relays.between(holder, worker.name)]:
            self._lose_input(action.batch, action.replica, action.requests, holders)
            return
        if worker.state != "broken":  # otherwise the scheduler is about to receive `ReplicaLost`
            if self._traces is not None:
                self._traces.sent(action, worker, plan.version.name, self.requests.spans(action.requests))
            payload = self._payload(action, batch.input, worker)
            sent = SentBatch(action.batch, action.stage, plan.number, action.requests, action.replica, time.monotonic())
            link.send(sent, payload)
            if nbytes := relayed_bytes(batch.input):
                self._metrics.link(action.stage, worker.slot.index).sent_bytes.inc(nbytes)
        self._count_sent(action, worker)

    def _payload(
        self, action: SendBatch, stored: Tensor | BatchInputs | KeptOutput, worker: Worker
    ) -> Tensor | BatchInputs:
        """What the worker receives: the input, or where it fetches it, and whether it keeps the output."""
        is_last = action.stage + 1 == self.scheduler.config.num_stages
        keep = self._keeps_output(action, worker.request.edge, is_last=is_last)
        if isinstance(stored, Tensor) and not (keep and action.stage == 0):
            return stored
        inputs = relayed_inputs(stored) if isinstance(stored, Tensor) else stored
        inputs = inputs.inputs() if isinstance(inputs, KeptOutput) else inputs
        return replace(inputs, keep=keep, expires_s=_UNCLAIMED_S if is_last else 0.0)

    def _keeps_output(self, action: SendBatch, holder: str, *, is_last: bool) -> bool:
        """Whether the worker should keep the output, because everyone who needs it can fetch it."""
        if not holder or not is_last:
            return bool(holder) and not self.relays.needed_from(holder)
        fetchers = self.requests.fetchers(action.requests)
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
