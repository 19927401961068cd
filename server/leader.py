"""The leader: the pipeline as the frontend sees it, and the employer of the workers.

What becomes of requests is the scheduler's to decide (server/shell.py does it), who serves what the recruiter's; here they meet.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from types import TracebackType

from torch import Tensor

from multiworld import WorldManager
from server.batch_traces import BatchTraces
from server.errors import RequestRefused
from server.link import Link
from server.maintenance import Maintenance
from server.metrics import Metrics
from server.operations_routes import why_not_ready
from server.predictor import Answer, ModelVersion, PipelineSnapshot
from server.recruiter import Recruiter
from server.rolling_restart import RestartStep, RollingRestart
from server.scheduling.events import Drain
from server.settings import ServeSettings
from server.shell import Shell, Surroundings
from server.under_way import UnderWay
from server.version_change import VersionChange, VersionSource
from server.versions import VersionPlan, Versions, link_id
from wire import Message

logger = logging.getLogger(__name__)


class Leader:
    """Implements `server.predictor.Pipeline`. Use as `async with`: it listens on entry and frees everything on exit.

    Args:
        model: its name.
        plan: the version to begin with.
        source: where further versions come from; None = there are none.
        traces: follows traced requests; None = nothing is traced.
        on_change: called when a replica changed its state, or the version changed.

    Attributes:
        under_way: requests that have begun; answered before the leader stops.
    """

    def __init__(
        self,
        model: str,
        plan: VersionPlan,
        settings: ServeSettings,
        metrics: Metrics,
        *,
        source: VersionSource | None = None,
        traces: BatchTraces | None = None,
        on_change: Callable[[PipelineSnapshot], None] = lambda _snapshot: None,
    ) -> None:
        self._model = model
        self._settings = settings
        self._metrics = metrics
        metrics.queue_limit(settings.queue_limit)
        self._on_change = on_change
        self._versions = Versions(plan)
        self._manager = WorldManager(
            secret=settings.secret,
            checked=False,  # links agree on sizes by headers of their own
            heartbeat_interval_s=settings.heartbeat_interval_s,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
        )
        self._recruiter = Recruiter(plan, settings, metrics, self._manager, self, self._states_changed)
        surroundings = Surroundings(
            model, self._versions.number_served, self._recruiter.link, self._duty_done, self._turn_over, traces
        )
        self._shell = Shell(settings, len(plan.stages), metrics, surroundings)
        self._maintenance = Maintenance()
        self._rolling_restart = RollingRestart(self._recruiter.slots, settings.join_timeout_s, self._maintenance)
        self._version_change = VersionChange(
            self, self._recruiter.slots, self._versions, source, settings.join_timeout_s, self._maintenance
        )
        self.under_way = UnderWay()
        self._draining = False
        self._unloaded = False
        self._started_s = time.monotonic()

    @property
    def join_port(self) -> int:
        """Where workers join; known once it listens."""
        return self._recruiter.port

    async def __aenter__(self) -> "Leader":
        self._recruiter.listen()
        self._metrics.version_serves(self._model, self._versions.current.version)
        self._states_changed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._draining = True
        self._shell.close()
        await self._recruiter.close()
        await self._manager.aclose()

    # -- Pipeline ------------------------------------------------------------------------------------------------------------

    async def predict(self, image: Tensor, *, deadline_s: float, request_id: str) -> Answer:
        """See `Predictor.predict`."""
        return await self._shell.predict(image, deadline_s=deadline_s, request_id=request_id)

    @property
    def version(self) -> ModelVersion:
        """See `Predictor.version`."""
        return self._versions.current.version

    @property
    def ready(self) -> bool:
        """See `Pipeline.ready`: every stage has a replica now, and we are not stopping."""
        return self._shell.scheduler.ready and not self._draining and not self._unloaded

    def snapshot(self) -> PipelineSnapshot:
        """See `Pipeline.snapshot`."""
        scheduler = self._shell.scheduler
        return PipelineSnapshot(
            model=self._model,
            version=self.version.name,
            ready=self.ready,
            draining=self._draining,
            uptime_s=time.monotonic() - self._started_s,
            queue_depth=scheduler.queue_depth,
            requests_in_flight=scheduler.open_requests,
            stages=self._recruiter.stages(self._in_flight),
            spares=self._recruiter.spares(),
            version_number=self.version.number,
            version_loading=self._version_change.loading,
            unloaded=self._unloaded,
        )

    async def check(self, *, deadline_s: float, ahead: int) -> None:
        """See `Predictor.check`."""
        if (refusal := self.refusal(deadline_s, ahead)) is not None:
            raise refusal

    def refusal(self, deadline_s: float, ahead: int) -> RequestRefused | None:
        """What `check` would raise."""
        found = self._shell.scheduler.refusal(deadline_s, time.monotonic(), ahead=ahead)
        if found is None:
            return None
        return RequestRefused.for_reason(found.reason, found.detail, retry_after_s=found.retry_after_s)

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """See `Predictor.request`."""
        if (closed := self.closed()) is not None:
            raise closed
        with self.under_way.one():
            yield

    def closed(self) -> RequestRefused | None:
        """Why requests are refused before they have begun, whatever the replicas do; None when they are not."""
        return why_not_ready(self.snapshot()) if self._unloaded or self._draining else None

    # -- what operators have done --------------------------------------------------------------------------------------------

    def restart_workers(self) -> AsyncGenerator[RestartStep, None]:
        """Restart every worker in turn while the others serve; yields each step. Raises MaintenanceError, RestartFailedError."""
        return self._rolling_restart.run()

    def let_in(self, *secrets: bytes) -> None:
        """Workers that know one of these may join from now on, and no others. Who has joined stays."""
        self._manager.let_in(*secrets)

    async def load_version(self, weights: str | None) -> ModelVersion:
        """Move to another version without failing a request; back into service, too, where the model was unloaded.

        Args:
            weights: as the source takes it; None for those of the settings.
        Raises:
            MaintenanceError, models.ModelError, VersionFailedError: nothing has changed.
        """
        version = await self._version_change.run(weights)
        if self._unloaded:
            self._unloaded = False
            logger.info("the model is in service again")
            self._states_changed()
        await self.under_way.informed()
        return version

    async def unload(self) -> None:
        """Take no more requests, and wait until those that there are have their answers. Workers stay as they are.

        Raises:
            MaintenanceError: something else is under way.
        """
        with self._maintenance.of("unloading the model"):
            self._unloaded = True
            logger.warning("the model is unloaded: requests are refused until it is loaded")
            self._states_changed()
            await self.under_way.none()

    async def drain(self, timeout_s: float) -> None:
        """Take no new requests and wait until all have their answers, at the most for `timeout_s`."""
        logger.info("stopping: %d requests to answer first", self.under_way.count)
        self._draining = True
        self._recruiter.stop()
        self._shell.feed(Drain(admits=True))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.under_way.none()  # some are being read or decoded, and the scheduler does not know them yet
        self._shell.feed(Drain())
        if self.under_way.count:
            logger.warning("stopping with %d requests unanswered", self.under_way.count)

    # -- what links do (see `Employer`) ------------------------------------------------------------------------------------------

    def on_serving(self, link: Link) -> None:
        """See `Employer`."""
        for event in self._versions.take_up(link):
            self._shell.feed(event)

    def on_leaving(self, link: Link) -> None:
        """See `Employer`."""
        for event in self._versions.leave(link):
            self._shell.feed(event)
        if not link.duties:
            link.close()

    def on_ended(self, link: Link) -> None:
        """See `Employer`."""
        for event in self._versions.lose(link):
            self._shell.feed(event)
        link.duties.clear()
        self._shell.on_ended(link)

    def on_result(self, link: Link, message: Message) -> None:
        """See `BatchListener`."""
        self._shell.on_result(link, message)

    def on_failed(self, link: Link, message: Message) -> None:
        """See `BatchListener`."""
        self._shell.on_failed(link, message)

    # -- versions --------------------------------------------------------------------------------------------------------------

    def move_to(self, plan: VersionPlan) -> None:
        """New requests go to `plan`, which the links that serve hold by now; what began with the version before ends with it."""
        former = self.version
        self._versions.move_to(plan)
        self._recruiter.plan = plan
        logger.info("version %s (number %d) -> %s (number %d)", former.name, former.number, *reversed(plan.version))
        for link in self._recruiter.serving():
            if link.state == "ready":  # who leaves would take new batches, and never be done
                self.on_serving(link)
        self._metrics.version_serves(self._model, plan.version)
        self._states_changed()

    def _turn_over(self) -> None:
        """Something has happened: is the version before still in use?"""
        self._version_change.look()
        retiring, scheduler = self._versions.retiring, self._shell.scheduler
        if retiring is None or scheduler.current_version != self.version.name:
            return
        if not scheduler.batches_of(retiring.version.name):
            self._versions.retiring = None
            self._retire(retiring.version.number)

    def _retire(self, number: int) -> None:
        for slot in (*self._recruiter.slots.all, *self._recruiter.slots.spares):
            link = slot.link
            if link is None or slot.free:
                continue
            if number in link.duties:
                for event in self._versions.lay_down(link, number):
                    self._shell.feed(event)
            elif number in link.holds:
                link.drop(number)

    def _duty_done(self, duty: str) -> None:
        link = self._recruiter.link(link_id(duty))
        if link is None:
            return
        number = int(duty.partition("@")[2])
        link.duties.discard(number)
        if number != self.version.number and link.state == "ready":
            link.drop(number)
        elif not link.duties:
            link.close()

    def _in_flight(self, link: Link) -> int:
        return sum(self._shell.scheduler.in_flight(duty) for duty in self._versions.duties_of(link))

    def _states_changed(self) -> None:
        snapshot = self.snapshot()
        self._metrics.replica_states(snapshot.stages)
        self._metrics.spares(len(snapshot.spares), self._recruiter.kept_away())
        self._on_change(snapshot)
