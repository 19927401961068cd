"""Connects the pure scheduler to the event loop: submits events, performs actions, sets the timer.

The scheduler decides; the driver holds the tensors, the clock and the futures. Everything runs on one event loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial

from torch import Tensor

from multiworld import Cause
from multiworld_serving.common.wire.inputs import LostInput
from multiworld_serving.common.wire.message import Message, MessageKind
from multiworld_serving.server.errors import (
    DrainingError,
    InputUnreachableError,
    RequestRejected,
    StageError,
)
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.observability.leader_metrics import LeaderMetrics
from multiworld_serving.server.pipeline.batch_counts import count_sent
from multiworld_serving.server.pipeline.batch_tensors import (
    BatchTensors,
    InputRow,
    KeptOutput,
    relayed_bytes,
)
from multiworld_serving.server.pipeline.driver_context import DriverContext, Part, PendingRequest, SentBatch
from multiworld_serving.server.pipeline.edge_routing import EdgeRouting
from multiworld_serving.server.pipeline.scheduler_config import scheduler_config
from multiworld_serving.server.predictor import Prediction
from multiworld_serving.server.replicas.replica_ids import link_id
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
from multiworld_serving.server.scheduling.events import (
    BatchDone,
    BatchFailed,
    Event,
    InputLost,
    ReplicaId,
    RequestArrived,
    RequestCancelled,
    Tick,
)
from multiworld_serving.server.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

_LOST_AFTER_S = 0.5
"""A request without an outcome this long after its deadline is reported as lost. The scheduler must never let that happen."""
_WHY_BROKEN = {
    "hang": "no answer within hang_timeout_s",
    "error": "batches that fail there succeed elsewhere",
}
"""Explanation of the cause of a `FailReplica`."""


class SchedulerDriver:
    """Owns the scheduler, the pending requests and the tensors."""

    def __init__(
        self, settings: LeaderSettings, num_stages: int, metrics: LeaderMetrics, context: DriverContext
    ) -> None:
        self._metrics = metrics
        self._context = context
        self._traces = context.traces
        self.scheduler = Scheduler(scheduler_config(settings, num_stages))
        self._tensors = BatchTensors()
        self._pending: dict[int, PendingRequest] = {}
        """By the id of each sample that has no outcome."""
        self._in_flight: dict[tuple[int, str], SentBatch] = {}
        """By batch and link."""
        self._events: deque[tuple[Event, Tensor | KeptOutput | None]] = deque()
        self._handling = False
        self._arrived: Tensor | KeptOutput | None = None
        """The output of the batch whose event is being handled."""
        self._wanted = False
        """Whether an action for the event has used the output."""
        self.edges = EdgeRouting(num_stages)
        self._next_request = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        """When the timer fires, as `time.monotonic()`."""

    def close(self) -> None:
        """Stop the timer and end all pending requests with `DrainingError`."""
        if self._timer is not None:
            self._timer.cancel()
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(DrainingError("the server has stopped; send the request again"))

    def begin(
        self,
        rows: Sequence[InputRow],
        *,
        deadline_s: float,
        request_id: str,
        fetcher: str | None = None,
        key: str = "",
    ) -> asyncio.Future[Prediction]:
        """Start a request; see `multiworld_serving.server.predictor.Predictor.predict`. Cancelling the future withdraws it.

        Args:
            rows: the input of each sample, or where it is.
            fetcher: the frontend that fetches the output from the workers (`Prediction.kept`) if they keep it; None: the prediction
                has the output.
        The future raises InputUnreachableError if the input is at a frontend that the worker cannot reach: send it again with the input.
        """
        loop, now_s = asyncio.get_running_loop(), time.monotonic()
        future: asyncio.Future[Prediction] = loop.create_future()
        pending = PendingRequest(future, rows, request_id, now_s, deadline_s, key, fetcher)
        timer = loop.call_later(max(0.0, deadline_s - now_s) + _LOST_AFTER_S, pending.lose, self._metrics)
        future.add_done_callback(partial(self._ended, pending, timer))
        self._submit_samples(pending, range(len(rows)))
        return future

    def _submit_samples(self, pending: PendingRequest, samples: Sequence[int]) -> None:
        """Hand samples of a request to the scheduler, each with a new id."""
        first = self._next_request
        self._next_request += len(samples)
        for request, at in enumerate(samples, first):
            pending.open[request] = at
            self._pending[request] = pending
            self._tensors.rows[request] = pending.rows[at]
            if self._traces is not None:
                self._traces.request_started(request)
        self.submit_event(RequestArrived(first, pending.deadline_s, pending.key, len(samples)))

    def _ended(self, pending: PendingRequest, timer: asyncio.TimerHandle, _: asyncio.Future[Prediction]) -> None:
        """The future of a request has an outcome or is cancelled: withdraw the samples that have none."""
        timer.cancel()
        for request in tuple(pending.open):
            self._close(request)
            self.submit_event(RequestCancelled(request))

    # -- events of links -----------------------------------------------------------------------------------------------------

    def on_ended(self, link: WorkerLink) -> None:
        """Forget the batches in flight on a link that has ended."""
        for key in [key for key in self._in_flight if key[1] == link.id]:
            del self._in_flight[key]
        if link.request.edge:
            self.edges.forget(link.request.edge, link.worker)
        if self._traces is not None:
            self._traces.link_ended(link)

    def on_result(self, link: WorkerLink, message: Message) -> None:
        """See `multiworld_serving.server.replicas.worker_link.BatchListener`. Raises WireError."""
        kept = link.kept(message) if message.kind is MessageKind.KEPT else None
        sent = self._in_flight.pop((message.batch, link.id), None)
        if sent is None:  # the link has just ended
            return
        assert message.payload is not None, "the link has checked it"
        output = message.payload if kept is None else KeptOutput(link, kept[0], len(sent.requests), kept[1])
        # The times reported by a worker are not trusted: limit them to the time since the batch was sent.
        took_s = time.monotonic() - sent.sent_s
        compute_s = min(message.compute_ns / 1e9, took_s)
        waited_s = min(message.waited_us / 1e6, took_s - compute_s)
        transfer_s = took_s - compute_s - waited_s
        of_link, nbytes = self._metrics.link(sent.stage, link.slot.index), relayed_bytes(output)
        of_link.compute_s.observe(compute_s)
        of_link.transfer_s.observe(transfer_s)
        if nbytes:
            of_link.received_bytes.inc(nbytes)
            self._metrics.relayed_from_workers.inc(nbytes)
        if self._traces is not None:
            self._traces.answered(message.batch, link, compute_s, waited_s, transfer_s)
        times = self._tensors.times.get(message.batch)
        if times is not None:
            times.compute_s += compute_s
            times.transfer_s += transfer_s
        done = BatchDone(message.batch, sent.replica, compute_s, transfer_s, kept is not None)
        self.submit_event(done, output)

    def on_input_lost(self, link: WorkerLink, message: Message) -> None:
        """See `multiworld_serving.server.replicas.worker_link.BatchListener`. Raises WireError."""
        lost = LostInput.parse(message)
        sent = self._in_flight.pop((message.batch, link.id), None)
        if sent is None:  # the link has just ended
            return
        logger.warning("world=%s batch=%d the input is lost: %s", link.world_name, message.batch, lost.detail)
        if self._traces is not None:
            self._traces.failed(message.batch, link, "the input is lost")
        for holder in self._tensors.relayed_holders(message.batch, lost):
            self.edges.relay(holder, link.worker)
        self._lose_input(message.batch, sent.replica, sent.requests, lost.holders)

    def _lose_input(self, batch: int, replica: ReplicaId, requests: tuple[int, ...], holders: Collection[str]) -> None:
        """Hand the requests whose inputs are at `holders` back to their frontends. The others of the batch start again."""
        for request in self._tensors.requests_at(requests, holders):
            if (pending := self._pending.get(request)) is not None:
                self._fail(pending, InputUnreachableError("a worker cannot fetch the input from its frontend"))
        self._metrics.inputs_lost.inc()
        self.submit_event(InputLost(batch, replica))

    def on_failed(self, link: WorkerLink, message: Message) -> None:
        """See `multiworld_serving.server.replicas.worker_link.BatchListener`."""
        error = message.reason()
        logger.warning(
            "world=%s generation=%d batch=%d failed: %s", link.world_name, link.generation, message.batch, error
        )
        sent = self._in_flight.pop((message.batch, link.id), None)
        if sent is not None:
            if self._traces is not None:
                self._traces.failed(message.batch, link, error)
            self.submit_event(BatchFailed(message.batch, sent.replica, error))

    # -- events and actions of the scheduler ---------------------------------------------------------------------------------

    def submit_event(self, event: Event, output: Tensor | KeptOutput | None = None) -> None:
        """Submit an event to the scheduler, perform its actions, and set the timer.

        Actions may submit further events; these are handled after all actions of the current event. An event or action that raises
        does not stop the others, and the timer is set in any case.

        Args:
            output: for `BatchDone`: the output tensor, or where it is kept.
        """
        self._events.append((event, output))
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                following, self._arrived = self._events.popleft()
                self._wanted = False
                for action in self._decide(following):
                    self._try_perform(action)
                if isinstance(self._arrived, KeptOutput) and not self._wanted:
                    self._arrived.release()
        finally:
            self._handling = False
            self._arrived = None
            self._wake_at(self.scheduler.next_wakeup_s())
        self._context.after_event()

    def _decide(self, event: Event) -> list[Action]:
        try:
            return self.scheduler.handle(event, time.monotonic())
        except Exception as error:
            logger.exception("the scheduler failed on %s; this is a bug, please report it", type(event).__name__)
            if isinstance(event, RequestArrived):
                self._leader_failed(event.request, error)
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
                    self._tensors.free_input(action.batch)  # otherwise the next stage would get the input of this stage
                case Answer():
                    for request, _ in action.rows:
                        self._leader_failed(request, error)
                case Reject():
                    self._leader_failed(action.request, error)

    def _not_sent(self, action: SendBatch, error: Exception) -> None:
        id_of_link = link_id(action.replica)
        self._in_flight.pop((action.batch, id_of_link), None)
        if self._traces is not None and (link := self._context.find_link(id_of_link)):
            self._traces.failed(action.batch, link, "the batch was not sent")
        self.submit_event(BatchFailed(action.batch, action.replica, f"{type(error).__name__}: {error}", sent=False))

    def _wake_at(self, wakeup_s: float | None) -> None:
        """Set the timer. One that fires earlier is left as it is: its `Tick` sets the next one."""
        if wakeup_s is None or (self._timer is not None and self._timer_s <= wakeup_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = wakeup_s
        delay_s = max(0.0, wakeup_s - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.submit_event(Tick())

    def _perform(self, action: Action) -> None:
        match action:
            case SendBatch():
                self._send(action)
            case KeepOutput():
                self._tensors.replace(action.batch, self._arrived_output())
                self._wanted = True
                self._stage_ended(action.batch)
            case Answer():
                self._answer(action)
            case Reject():
                self._reject(action)
            case FreeBatch():
                self._tensors.free(action.batch)
                self._stage_ended(action.batch)
            case FailReplica():
                if link := self._context.find_link(link_id(action.replica)):
                    link.fail(Cause(action.cause), _WHY_BROKEN[action.cause])
            case ReleaseReplica():
                self._context.on_released(action.replica)

    def _stage_ended(self, batch: int) -> None:
        if self._traces is not None:
            self._traces.stage_ended(batch)

    def _send(self, action: SendBatch) -> None:
        stored = self._tensors.get_input(action.batch, action.requests if action.stage == 0 else ())
        id_of_link = link_id(action.replica)
        link = self._context.find_link(id_of_link)
        if link is not None and (holders := self.edges.unreachable_holders(stored, link)):
            self._lose_input(action.batch, action.replica, action.requests, holders)
            return
        self._in_flight[action.batch, id_of_link] = SentBatch(
            time.monotonic(), action.stage, action.replica, action.requests
        )
        # Otherwise the link has just ended, and the scheduler is about to receive `ReplicaLost`.
        if link is not None and link.state != "broken":
            plan = self._context.find_plan(action.version)
            traced = self._traces.sent(action, link, plan.version.name) if self._traces is not None else None
            self.edges.send(action, link, stored, plan.number, self._fetchers(action.requests), traced or ())
            if nbytes := relayed_bytes(stored):
                self._metrics.link(action.stage, link.slot.index).sent_bytes.inc(nbytes)
        count_sent(self._metrics, action)

    def _fetchers(self, requests: tuple[int, ...]) -> list[str | None]:
        return [pending.fetcher for request in requests if (pending := self._pending.get(request)) is not None]

    def _answer(self, action: Answer) -> None:
        output = self._arrived_output()
        times = self._tensors.times[action.batch]
        version = self._context.find_plan(action.version).version
        path = tuple(replica.partition("#")[0] for replica in action.path)
        found: dict[int, tuple[PendingRequest, list[int], list[int]]] = {}
        """By the identity of the request: its samples in this batch, and their rows."""
        for request, row in action.rows:
            pending = self._pending.get(request)
            if pending is None:
                self._metrics.duplicates.inc()
                continue
            _, samples, rows = found.setdefault(id(pending), (pending, [], []))
            samples.append(pending.open[request])
            rows.append(row)
            self._close(request)
            self._wanted = True
        for pending, samples, rows in found.values():
            pending.parts.append(
                Part(
                    *(tuple(samples), tuple(rows), output, version, times.compute_s, times.transfer_s),
                    *(action.attempts, path, len(action.rows)),
                )
            )
            if not pending.open:
                try:
                    self._finish(pending)
                except Exception as error:
                    logger.exception("request_id=%s cannot be answered", pending.request_id)
                    self._fail(pending, StageError(f"the leader failed: {type(error).__name__}: {error}"))

    def _finish(self, pending: PendingRequest) -> None:
        """All samples are computed: answer, or compute those of a former version again."""
        current = self.scheduler.current_version
        version = pending.parts[-1].version if current is None else self._context.find_plan(current).version
        if all(part.version == pending.parts[0].version for part in pending.parts):
            if not pending.future.done():
                pending.future.set_result(pending.prediction(self._context.model, time.monotonic()))
            return
        stale = [at for part in pending.parts if part.version != version for at in part.at]
        pending.parts = [part for part in pending.parts if part.version == version]
        self._submit_samples(pending, sorted(stale))

    def _reject(self, action: Reject) -> None:
        if (pending := self._pending.get(action.request)) is not None:
            logger.debug("request_id=%s rejected reason=%s %s", pending.request_id, action.reason, action.detail)
            self._close(action.request)
            error = RequestRejected.for_reason(action.reason, action.detail, retry_after_s=action.retry_after_s)
            self._fail(pending, error)

    def _leader_failed(self, request: int, error: Exception) -> None:
        """End the request of this sample with an error, because the leader itself failed."""
        if (pending := self._pending.get(request)) is not None:
            self._fail(pending, StageError(f"the leader failed: {type(error).__name__}: {error}"))

    def _fail(self, pending: PendingRequest, error: Exception) -> None:
        """End a request with an error. Its other samples are withdrawn."""
        if not pending.future.done():
            pending.future.set_exception(error)
        for request in tuple(pending.open):
            self._close(request)
            self.submit_event(RequestCancelled(request))

    def _close(self, request: int) -> None:
        """Forget a sample that has its outcome."""
        self._tensors.rows.pop(request, None)
        if self._traces is not None:
            self._traces.request_ended(request)
        if (pending := self._pending.pop(request, None)) is not None:
            del pending.open[request]

    def _arrived_output(self) -> Tensor | KeptOutput:
        assert self._arrived is not None, "only BatchDone has an output"
        return self._arrived
