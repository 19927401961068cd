"""Connects the pure scheduler to the event loop: submits events, performs actions, sets the timer.

The scheduler decides; the driver holds the tensors, the clock and the futures. Everything runs on one event loop.
"""

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable

from torch import Tensor

from multiworld import Cause
from multiworld.texts import one_line
from multiworld_serving.common.wire.inputs import RowsLost
from multiworld_serving.common.wire.work import Computed, Failed
from multiworld_serving.server.leader.metrics import LeaderMetrics
from multiworld_serving.server.leader.pipeline.batches import Batches
from multiworld_serving.server.leader.pipeline.inputs import relayed_bytes
from multiworld_serving.server.leader.pipeline.requests import Requests
from multiworld_serving.server.leader.replicas.worker import SentBatch, Worker
from multiworld_serving.server.leader.replicas.worker_link import KeptOutput, Outcome, WorkerLink
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
from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from multiworld_serving.server.leader.scheduling.events import (
    BatchDone,
    BatchFailed,
    Events,
    ReplicaDraining,
    ReplicaLost,
    ReplicaReady,
    RequestArrived,
    Tick,
)
from multiworld_serving.server.leader.scheduling.scheduler import Scheduler
from multiworld_serving.server.leader.versions.version_table import VersionPlan, VersionTable

logger = logging.getLogger(__name__)

_CAUSED_BY_INPUT = re.compile(r"\bindex\b.* out of (range|bounds)")
"""In the errors of torch's operators for an index that the model does not have, such as a number of a word."""
_WHY_BROKEN = {
    "hang": "no answer within hang_timeout_s",
    "error": "batches that fail there succeed elsewhere",
}
"""Explanation of the cause of a `FailReplica`."""


class SchedulerDriver:
    """Owns the scheduler, and the inputs of batches.

    Args:
        model: the name of the model.
        after_event: called after every event. Must not raise: see `common.observers`.

    Attributes:
        released: draining replicas that have no batches in flight any more. `after_event` removes them.
        requests: of clients.
        batches: of their rows.
    """

    def __init__(
        self,
        model: str,
        config: SchedulerConfig,
        metrics: LeaderMetrics,
        versions: VersionTable,
        after_event: Callable[[], None],
    ) -> None:
        self.scheduler = Scheduler(config)
        self.requests = Requests(model, metrics, versions, self._arrive, self.submit_event)
        self.batches = Batches(self.requests, metrics)
        self.released: list[tuple[Worker, int]] = []
        self._metrics = metrics
        self._after_event = after_event
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
        self.batches.replicas[replica] = link, plan
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
            self.batches.replicas.pop(replica, None)
        worker.replicas.clear()

    def in_flight(self, worker: Worker) -> int:
        """Batches in flight at this worker."""
        return sum(self.scheduler.in_flight(worker.replica(version)) for version in worker.replicas)

    def on_batch(
        self, worker: Worker, sent: SentBatch, outcome: Outcome, output: Tensor | KeptOutput | None = None
    ) -> None:
        """A batch has returned from a worker, with the output if it was computed."""
        match outcome:
            case Failed():
                self._on_failed(worker, sent, str(outcome.error()))
            case RowsLost():
                self._on_input_lost(worker, sent, outcome)
            case Computed():
                assert output is not None, "it was computed"
                self._on_result(worker, sent, outcome, output)

    def _on_result(self, worker: Worker, sent: SentBatch, done: Computed, output: Tensor | KeptOutput) -> None:
        # The times reported by a worker are not trusted: limit them to the time since the batch was sent.
        took_s = time.monotonic() - sent.sent_s
        compute_s = min(done.compute_ns / 1e9, took_s)
        waited_s = min(done.waited_us / 1e6, took_s - compute_s)
        transfer_s = took_s - compute_s - waited_s
        of_slot, nbytes = self._metrics.link(sent.stage, worker.slot.index), relayed_bytes(output)
        of_slot.compute_s.observe(compute_s)
        of_slot.transfer_s.observe(transfer_s)
        if nbytes:
            of_slot.received_bytes.inc(nbytes)
            self._metrics.relayed_from_workers.inc(nbytes)
        sent.end("", compute_s, transfer_s)
        self.batches.computed(sent.batch, compute_s, transfer_s)
        self.submit_event(
            BatchDone(sent.batch, sent.replica, compute_s, transfer_s, isinstance(output, KeptOutput)), output
        )

    def _on_input_lost(self, worker: Worker, sent: SentBatch, lost: RowsLost) -> None:
        why = one_line(lost.why)
        sent.end(f"the input is lost: {why}")
        logger.warning(
            "world=%s batch=%d request_id=%s the input is lost: %s",
            *(worker.id.world, sent.batch, sent.request_ids, why),
        )
        if sent.batch in self.batches:  # otherwise its requests have ended or start again
            self.requests.lose_input(sent.requests, why)
        self.submit_event(BatchFailed(sent.batch, sent.replica, why, sent=False))

    def _on_failed(self, worker: Worker, sent: SentBatch, error: str) -> None:
        sent.end(error)
        logger.warning(
            "world=%s generation=%d batch=%d request_id=%s failed: %s",
            *(*worker.id, sent.batch, sent.request_ids, error),
        )
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
                    why = f"{type(error).__name__}: {error}"
                    self.submit_event(BatchFailed(action.batch, action.replica, why, sent=False))
                case KeepOutput():
                    self.batches.drop_input(action.batch)  # otherwise the next stage would get the input of this stage
                case Answer():
                    for request, _ in action.rows:
                        self.requests.leader_failed(request, error)
                case Reject():
                    self.requests.leader_failed(action.request, error)

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
                self.batches.send(action)
            case KeepOutput():
                self.batches.keep(action, self._take_output)
            case Answer():
                self.batches.answer(action, self._take_output, self.scheduler.current_version)
            case Reject():
                self.requests.reject(action)
            case FreeBatch():
                self.batches.free(action.batch)
            case FailReplica():
                if found := self.batches.replicas.get(action.replica):
                    found[0].fail(Cause(action.cause), _WHY_BROKEN[action.cause])
            case ReleaseReplica():
                if found := self.batches.replicas.pop(action.replica, None):
                    self.released.append((found[0].worker, found[1].number))

    def _take_output(self) -> Tensor | KeptOutput:
        """The output of the batch whose event is being handled. It is released if nothing takes it."""
        event, output = self._current or (None, None)
        assert event is not None
        assert output is not None, "only BatchDone has an output, and one action takes it"
        self._current = event, None
        return output
