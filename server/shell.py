"""The scheduler's shell: it tells the scheduler what happens, and does what the scheduler says.

All decisions are the scheduler's; here are the tensors, the clock and the futures. Everything runs on one event loop.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from multiworld import Cause
from server.batch_traces import BatchTraces
from server.errors import DeadlineError, DrainingError, RequestRefused
from server.link import Link
from server.metrics import HEDGE_OUTCOMES, Metrics
from server.payloads import Payloads
from server.predictor import Answer as Prediction
from server.scheduler import Scheduler
from server.scheduling.actions import (
    Action,
    Answer,
    BreakLink,
    CloseLink,
    ForgetBatch,
    KeepOutput,
    Refuse,
    SendBatch,
)
from server.scheduling.config import SchedulerConfig
from server.scheduling.events import (
    BatchDone,
    BatchFailed,
    Event,
    RequestArrived,
    RequestCancelled,
    Tick,
)
from server.settings import ServeSettings
from server.versions import link_id
from wire import Message, WireError

logger = logging.getLogger(__name__)

_LOST_AFTER_S = 0.5
"""A request that has heard nothing so long after its deadline would wait for ever. The scheduler lets that happen to none."""
_WHY_BROKEN = {
    "hang": "no answer within hang_timeout_s",
    "error": "batches that fail there succeed elsewhere",
}
"""In words, by the cause with which the scheduler has a link broken."""


@dataclass(slots=True)
class _Waiting:
    """A request whose caller waits."""

    future: asyncio.Future[Prediction]
    request_id: str
    arrived_s: float


@dataclass(slots=True)
class _Flight:
    """One copy of a batch on one link."""

    sent_s: float
    rows: int
    stage: int
    duty: str


@dataclass(frozen=True)
class Surroundings:
    """What the shell needs of the leader.

    Attributes:
        model: its name.
        number_of: the number of a version by its name.
        link: a link that lives, by its id.
        on_duty_done: a link has finished what it had of one version (the id of its duty), and is to get no more.
        on_turn: called after whatever has happened.
        traces: follows traced requests; None where nothing is traced.
    """

    model: str
    number_of: Callable[[str], int]
    link: Callable[[str], Link | None]
    on_duty_done: Callable[[str], None]
    on_turn: Callable[[], None]
    traces: BatchTraces | None = None


class Shell:
    """Owns the scheduler, and everything that waits for it."""

    def __init__(self, settings: ServeSettings, num_stages: int, metrics: Metrics, surroundings: Surroundings) -> None:
        self._metrics = metrics
        self._around = surroundings
        self._traces = surroundings.traces
        self.scheduler = Scheduler(_config(settings, num_stages))
        self._payloads = Payloads()
        self._waiting: dict[int, _Waiting] = {}
        self._flights: dict[tuple[int, str], _Flight] = {}
        """By batch and link."""
        self._events: deque[tuple[Event, Tensor | None]] = deque()
        self._feeding = False
        self._hedges = dict.fromkeys(HEDGE_OUTCOMES, 0)
        """How many of each outcome the metrics know of."""
        self._arrived: Tensor | None = None
        """The output that has just come in, while the scheduler decides what becomes of it."""
        self._next_request = 0
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Nothing will happen any more: whoever waits is told so."""
        if self._timer is not None:
            self._timer.cancel()
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(DrainingError("the server has stopped; send the request again"))

    async def predict(self, image: Tensor, *, deadline_s: float, request_id: str) -> Prediction:
        """See `server.predictor.Predictor.predict`."""
        request = self._next_request
        self._next_request += 1
        future: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        self._waiting[request] = _Waiting(future, request_id, time.monotonic())
        self._payloads.images[request] = image
        if self._traces is not None:
            self._traces.request_began(request)
        self.feed(RequestArrived(request, deadline_s))
        try:
            await asyncio.wait((future,), timeout=deadline_s - time.monotonic() + _LOST_AFTER_S)
            if future.done():
                return future.result()
            self._metrics.request_lost()
            logger.error("request_id=%s was lost: neither answer nor error by its deadline", request_id)
            raise DeadlineError("no answer by the deadline, which is a bug; please report it")
        finally:
            if self._traces is not None:
                self._traces.request_ended(request)
            if self._waiting.pop(request, None) is not None:  # nobody has answered: the caller went away
                self._payloads.images.pop(request, None)
                self.feed(RequestCancelled(request))

    # -- what links say ------------------------------------------------------------------------------------------------------

    def on_ended(self, link: Link) -> None:
        """What was in flight there will not be answered."""
        for key in [key for key in self._flights if key[1] == link.id]:
            del self._flights[key]
        if self._traces is not None:
            self._traces.link_ended(link)

    def on_result(self, link: Link, message: Message) -> None:
        """See `server.link.BatchListener`."""
        now_s = time.monotonic()
        flight = self._flights.get((message.batch, link.id))
        if flight is None:
            logger.warning(
                "world=%s epoch=%d batch=%d answered what it was not sent", link.world_name, link.epoch, message.batch
            )
            return
        rows = len(message.payload) if message.payload is not None and message.payload.dim() else 0
        if rows != flight.rows:  # it stays in flight: what its link's end loses is sent elsewhere
            raise WireError(f"batch {message.batch} of {flight.rows} rows came back with {rows}")
        del self._flights[message.batch, link.id]
        compute_s = message.compute_ns / 1e9
        transfer_s = max(0.0, now_s - flight.sent_s - compute_s - message.waited_ns / 1e9)
        self._metrics.batch_answered(
            flight.stage,
            link.slot.index,
            compute_s=compute_s,
            transfer_s=transfer_s,
            payload_bytes=0 if message.payload is None else message.payload.nbytes,
        )
        if self._traces is not None:
            self._traces.answered(message, link, transfer_s)
        times = self._payloads.times.get(message.batch)
        if times is not None:
            times.compute_s += compute_s
            times.transfer_s += transfer_s
        self.feed(BatchDone(message.batch, flight.duty, compute_s, transfer_s), message.payload)

    def on_failed(self, link: Link, message: Message) -> None:
        """See `server.link.BatchListener`."""
        error = message.text()
        logger.warning("world=%s epoch=%d batch=%d failed: %s", link.world_name, link.epoch, message.batch, error)
        flight = self._flights.pop((message.batch, link.id), None)
        if flight is not None:
            self._metrics.batch_failed(link.stage, link.slot.index)
            if self._traces is not None:
                self._traces.failed(message.batch, link, error)
            self.feed(BatchFailed(message.batch, flight.duty, error))

    # -- what the scheduler says ---------------------------------------------------------------------------------------------

    def feed(self, event: Event, output: Tensor | None = None) -> None:
        """Tell the scheduler, do what it says, and wake up when it wants to be.

        What is done may cause further events: they wait until everything that this one asks for has been done.

        Args:
            output: of a batch that is done.
        """
        self._events.append((event, output))
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                following, self._arrived = self._events.popleft()
                for action in self.scheduler.handle(following, time.monotonic()):
                    self._perform(action)
        finally:
            self._feeding = False
            self._arrived = None
        self._metrics.queue_depth(self.scheduler.queue_depth)
        self._count_hedges()
        self._wake_at(self.scheduler.next_wakeup_s())
        self._around.on_turn()

    def _count_hedges(self) -> None:
        hedges = self.scheduler.counters.hedges
        if hedges.total() > sum(self._hedges.values()):
            for outcome in HEDGE_OUTCOMES:
                for _ in range(hedges[outcome] - self._hedges[outcome]):
                    self._metrics.hedged(outcome)
                self._hedges[outcome] = hedges[outcome]

    def _wake_at(self, wakeup_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wakeup_s is not None:
            delay_s = max(0.0, wakeup_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.feed(Tick())

    def _perform(self, action: Action) -> None:
        match action:
            case SendBatch():
                self._send(action)
            case KeepOutput():
                self._payloads.keep(action.batch, self._arrived_output())
                self._stage_ended(action.batch)
            case Answer():
                self._answer(action)
            case Refuse():
                self._refuse(action)
            case ForgetBatch():
                self._payloads.forget(action.batch)
                self._stage_ended(action.batch)
            case BreakLink():
                if link := self._around.link(link_id(action.link)):
                    link.give_up(Cause(action.cause), _WHY_BROKEN[action.cause])
            case CloseLink():
                self._around.on_duty_done(action.link)

    def _stage_ended(self, batch: int) -> None:
        if self._traces is not None:
            self._traces.stage_ended(batch)

    def _send(self, action: SendBatch) -> None:
        if action.kind == "first" and action.stage == 0:
            payload = self._payloads.form(action.batch, action.requests)
            self._metrics.batch_formed(len(action.requests))
            self._metrics.queued(action.waited_s)
        else:
            payload = self._payloads.input(action.batch)
        way = link_id(action.link)
        if action.kind == "reroute":
            self._metrics.rerouted(action.stage, action.waited_s)
            world, _, epoch = way.partition("#")
            logger.info(
                "batch=%d stage=%d rerouted to world=%s epoch=%s attempt=%d after_s=%.3f",
                *(action.batch, action.stage, world, epoch, action.attempt, action.waited_s),
            )
        if action.kind in ("reroute", "retry"):
            self._metrics.retried(action.stage)
        self._flights[action.batch, way] = _Flight(time.monotonic(), len(payload), action.stage, action.link)
        # Else it has just ended, and the scheduler is about to learn of it.
        if (link := self._around.link(way)) and link.state != "broken":
            self._metrics.batch_sent(action.stage, link.slot.index, payload.nbytes)
            traced = self._traces.sent(action, link) if self._traces is not None else ()
            link.send(action.batch, payload, self._around.number_of(action.version), traced)

    def _answer(self, action: Answer) -> None:
        probabilities = self._arrived_output()
        times = self._payloads.times[action.batch]
        now_s = time.monotonic()
        for request, row in action.rows:
            self._payloads.images.pop(request, None)
            waiting = self._waiting.pop(request, None)
            if waiting is None or waiting.future.done():
                self._metrics.duplicate_answer()
                continue
            waiting.future.set_result(
                Prediction(
                    probabilities=probabilities[row],
                    model=self._around.model,
                    version=action.version,
                    version_number=self._around.number_of(action.version),
                    queue_s=max(0.0, now_s - waiting.arrived_s - times.compute_s - times.transfer_s),
                    compute_s=times.compute_s,
                    transfer_s=times.transfer_s,
                    attempts=action.attempts,
                    path=tuple(duty.partition("#")[0] for duty in action.path),
                    batch_size=len(action.rows),
                )
            )

    def _refuse(self, action: Refuse) -> None:
        self._payloads.images.pop(action.request, None)
        waiting = self._waiting.pop(action.request, None)
        if waiting is None or waiting.future.done():
            return
        logger.debug("request_id=%s refused reason=%s %s", waiting.request_id, action.reason, action.detail)
        waiting.future.set_exception(
            RequestRefused.for_reason(action.reason, action.detail, retry_after_s=action.retry_after_s)
        )

    def _arrived_output(self) -> Tensor:
        assert self._arrived is not None, "only a batch that was just answered has an output"
        return self._arrived


def _config(settings: ServeSettings, num_stages: int) -> SchedulerConfig:
    return SchedulerConfig(
        num_stages=num_stages,
        max_batch_size=settings.max_batch_size,
        batch_timeout_s=settings.batch_timeout_s,
        adaptive_batching=settings.batching == "adaptive",
        window=settings.window,
        queue_limit=settings.queue_limit,
        recovery_grace_s=settings.recovery_grace_s,
        max_attempts=settings.max_attempts,
        hang_timeout_s=settings.hang_timeout_s,
        hedge_factor=settings.hedge_factor or None,
        hedge_floor_s=settings.hedge_floor_s,
        hedge_budget=settings.hedge_budget,
    )
