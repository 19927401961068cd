"""The leader: it hands the scheduler what happens, and does what the scheduler says.

All decisions are the scheduler's; here are the tensors, the links, the clock and the futures. Everything runs on one event loop.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from types import TracebackType

from torch import Tensor

from models import LoadedModel
from multiworld import Cause, WorldManager
from server.errors import DeadlineError, DrainingError, RequestRefused
from server.link import Link
from server.metrics import HEDGE_OUTCOMES, Metrics
from server.payloads import Payloads
from server.plan import StagePlan
from server.predictor import Answer as Prediction
from server.predictor import PipelineSnapshot
from server.recruiter import Recruiter
from server.rolling_restart import RestartStep, RollingRestart
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
    Drain,
    Event,
    LinkBroken,
    LinkDraining,
    LinkReady,
    RequestArrived,
    RequestCancelled,
    Tick,
)
from server.settings import ServeSettings
from wire import Message

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
    stage: int


class Leader:
    """Implements `server.predictor.Predictor`. Use as `async with`: it listens on entry and frees everything on exit.

    Args:
        on_change: called when a replica changed its state.
    """

    def __init__(
        self,
        model: LoadedModel,
        plan: tuple[StagePlan, ...],
        settings: ServeSettings,
        metrics: Metrics,
        *,
        on_change: Callable[[PipelineSnapshot], None] = lambda _snapshot: None,
    ) -> None:
        self._model = model
        self._plan = plan
        self._settings = settings
        self._metrics = metrics
        metrics.queue_limit(settings.queue_limit)
        self._on_change = on_change
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_stages=len(plan),
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
        )
        self._manager = WorldManager(
            secret=settings.secret,
            checked=False,  # links agree on sizes by headers of their own
            heartbeat_interval_s=settings.heartbeat_interval_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
        )
        self._recruiter = Recruiter(plan, settings, metrics, self._manager, self, self._states_changed)
        self._rolling_restart = RollingRestart(self._recruiter.slots, settings.join_timeout_s)
        self._payloads = Payloads()
        self._waiting: dict[int, _Waiting] = {}
        self._flights: dict[tuple[int, str], _Flight] = {}
        self._events: deque[tuple[Event, Tensor | None]] = deque()
        self._feeding = False
        self._hedges = dict.fromkeys(HEDGE_OUTCOMES, 0)
        """How many of each outcome the metrics know of."""
        self._arrived: Tensor | None = None
        """The output that has just come in, while the scheduler decides what becomes of it."""
        self._next_request = 0
        self._timer: asyncio.TimerHandle | None = None
        self._drained = asyncio.Event()
        self._draining = False
        self._started_s = time.monotonic()

    @property
    def join_port(self) -> int:
        """Where workers join; known once it listens."""
        return self._recruiter.port

    async def __aenter__(self) -> "Leader":
        self._recruiter.listen()
        self._states_changed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._draining = True
        if self._timer is not None:
            self._timer.cancel()
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(DrainingError("the server has stopped; send the request again"))
        await self._recruiter.close()
        await self._manager.aclose()

    # -- Predictor -----------------------------------------------------------------------------------------------------------

    async def predict(self, image: Tensor, *, deadline_s: float, request_id: str) -> Prediction:
        """See `Predictor.predict`."""
        request = self._next_request
        self._next_request += 1
        future: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        self._waiting[request] = _Waiting(future, request_id, time.monotonic())
        self._payloads.images[request] = image
        self._feed(RequestArrived(request, deadline_s))
        try:
            await asyncio.wait((future,), timeout=deadline_s - time.monotonic() + _LOST_AFTER_S)
            if future.done():
                return future.result()
            self._metrics.request_lost()
            logger.error("request_id=%s was lost: neither answer nor error by its deadline", request_id)
            raise DeadlineError("no answer by the deadline, which is a bug; please report it")
        finally:
            if self._waiting.pop(request, None) is not None:  # nobody has answered: the caller went away
                self._payloads.images.pop(request, None)
                self._feed(RequestCancelled(request))

    @property
    def ready(self) -> bool:
        """See `Predictor.ready`: every stage has a replica now, and we are not stopping."""
        return self._scheduler.ready and not self._draining

    def snapshot(self) -> PipelineSnapshot:
        """See `Predictor.snapshot`."""
        return PipelineSnapshot(
            model=self._model.name,
            version=self._model.version,
            ready=self.ready,
            draining=self._draining,
            uptime_s=time.monotonic() - self._started_s,
            queue_depth=self._scheduler.queue_depth,
            requests_in_flight=self._scheduler.open_requests,
            stages=self._recruiter.stages(self._scheduler.in_flight),
            spares=self._recruiter.spares(),
        )

    def check(self, *, deadline_s: float, ahead: int) -> None:
        """See `Predictor.check`."""
        if refusal := self._scheduler.refusal(deadline_s, time.monotonic(), ahead=ahead):
            raise RequestRefused.for_reason(refusal.reason, refusal.detail, retry_after_s=refusal.retry_after_s)

    def restart_workers(self) -> AsyncGenerator[RestartStep, None]:
        """Restart every worker in turn while the others serve; yields each step. Raises RestartRefusedError, RestartFailedError."""
        return self._rolling_restart.run()

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait until all have their answers, at the most for `timeout_s`."""
        self._draining = True
        self._recruiter.stop()
        self._feed(Drain())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        if self._scheduler.open_requests:
            logger.warning("stopping with %d requests unanswered", self._scheduler.open_requests)

    # -- what links do (see `Employer`) ------------------------------------------------------------------------------------------

    def on_serving(self, link: Link) -> None:
        """See `Employer`."""
        self._feed(LinkReady(link.id, link.stage, self._model.version))

    def on_leaving(self, link: Link) -> None:
        """See `Employer`."""
        self._feed(LinkDraining(link.id))

    def on_ended(self, link: Link) -> None:
        """See `Employer`."""
        self._feed(LinkBroken(link.id, link.cause or ""))
        for key in [key for key in self._flights if key[1] == link.id]:
            del self._flights[key]

    def on_result(self, link: Link, message: Message) -> None:
        now_s = time.monotonic()
        flight = self._flights.pop((message.batch, link.id), None)
        if flight is None:
            logger.warning(
                "world=%s epoch=%d batch=%d answered what it was not sent", link.world_name, link.epoch, message.batch
            )
            return
        compute_s = message.compute_ns / 1e9
        transfer_s = max(0.0, now_s - flight.sent_s - compute_s - message.waited_ns / 1e9)
        self._metrics.batch_answered(
            flight.stage,
            link.slot.index,
            compute_s=compute_s,
            transfer_s=transfer_s,
            payload_bytes=0 if message.payload is None else message.payload.nbytes,
        )
        times = self._payloads.times.get(message.batch)
        if times is not None:
            times.compute_s += compute_s
            times.transfer_s += transfer_s
        self._feed(BatchDone(message.batch, link.id), message.payload)

    def on_failed(self, link: Link, batch: int, error: str) -> None:
        logger.warning("world=%s epoch=%d batch=%d failed: %s", link.world_name, link.epoch, batch, error)
        if self._flights.pop((batch, link.id), None) is not None:
            self._metrics.batch_failed(link.stage, link.slot.index)
        self._feed(BatchFailed(batch, link.id, error))

    # -- the scheduler's shell ---------------------------------------------------------------------------------------------------

    def _feed(self, event: Event, output: Tensor | None = None) -> None:
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
                for action in self._scheduler.handle(following, time.monotonic()):
                    self._perform(action)
        finally:
            self._feeding = False
            self._arrived = None
        self._metrics.queue_depth(self._scheduler.queue_depth)
        self._count_hedges()
        if self._draining and not self._scheduler.open_requests:
            self._drained.set()
        self._wake_at(self._scheduler.next_wakeup_s())

    def _count_hedges(self) -> None:
        hedges = self._scheduler.counters.hedges
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
        self._feed(Tick())

    def _perform(self, action: Action) -> None:
        match action:
            case SendBatch():
                self._send(action)
            case KeepOutput():
                self._payloads.keep(action.batch, self._arrived_output())
            case Answer():
                self._answer(action)
            case Refuse():
                self._refuse(action)
            case ForgetBatch():
                self._payloads.forget(action.batch)
            case BreakLink():
                if link := self._recruiter.link(action.link):
                    link.give_up(Cause(action.cause), _WHY_BROKEN[action.cause])
            case CloseLink():
                if link := self._recruiter.link(action.link):
                    link.close()

    def _send(self, action: SendBatch) -> None:
        if action.kind == "first" and action.stage == 0:
            payload = self._payloads.form(action.batch, action.requests)
            self._metrics.batch_formed(len(action.requests))
            self._metrics.queued(action.waited_s)
        else:
            payload = self._payloads.input(action.batch)
        if action.kind == "reroute":
            self._metrics.rerouted(action.stage, action.waited_s)
            world, _, epoch = action.link.partition("#")
            logger.info(
                "batch=%d stage=%d rerouted to world=%s epoch=%s attempt=%d after_s=%.3f",
                *(action.batch, action.stage, world, epoch, action.attempt, action.waited_s),
            )
        if action.kind in ("reroute", "retry"):
            self._metrics.retried(action.stage)
        self._flights[action.batch, action.link] = _Flight(time.monotonic(), action.stage)
        # Else it has just ended, and the scheduler is about to learn of it.
        if (link := self._recruiter.link(action.link)) and link.state != "broken":
            self._metrics.batch_sent(action.stage, link.slot.index, payload.nbytes)
            link.send(action.batch, payload)

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
                    model=self._model.name,
                    version=action.version,
                    queue_s=max(0.0, now_s - waiting.arrived_s - times.compute_s - times.transfer_s),
                    compute_s=times.compute_s,
                    transfer_s=times.transfer_s,
                    attempts=action.attempts,
                    path=tuple(link.partition("#")[0] for link in action.path),
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

    def _states_changed(self) -> None:
        snapshot = self.snapshot()
        self._metrics.replica_states(snapshot.stages)
        self._metrics.spares(len(snapshot.spares), self._recruiter.kept_away())
        self._on_change(snapshot)
