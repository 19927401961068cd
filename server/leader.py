"""The leader: connects the scheduler to the workers, and computes the requests of frontends.

The scheduler (through `pipeline/driver.py`) decides about requests and batches. `replicas/reconcile.py` decides what each worker holds,
and `replicas/registry.py` performs it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from functools import partial
from types import TracebackType

from multiworld import WorldManager
from multiworld_serving.common.observers import suppress_errors
from multiworld_serving.common.wire.join import JoinOffer, JoinRequest
from multiworld_serving.server.administration import Desired, OperationInProgressError, VersionFailedError
from multiworld_serving.server.capacity_report import CapacityReport
from multiworld_serving.server.errors import DrainingError, NotReadyError, RequestRejected
from multiworld_serving.server.frontends.sessions import FrontendSessions
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.observability.leader_metrics import LeaderMetrics, PipelineCollector
from multiworld_serving.server.operations import Operations
from multiworld_serving.server.pipeline.batch_traces import BatchTraces
from multiworld_serving.server.pipeline.driver import SchedulerDriver
from multiworld_serving.server.predictor import ModelVersion, RestartStep, ServedModel
from multiworld_serving.server.replicas.paced import Paced
from multiworld_serving.server.replicas.registry import WorkerRegistry
from multiworld_serving.server.scheduling.config import SchedulerConfig
from multiworld_serving.server.scheduling.events import Drain
from multiworld_serving.server.snapshots import PipelineSnapshot
from multiworld_serving.server.versions.model_source import ModelSource
from multiworld_serving.server.versions.version_table import VersionPlan, VersionTable

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""Between attempts to load what the other leaders serve."""


class Leader:
    """One leader. Use as `async with`: it listens on entry and frees everything on exit.

    Args:
        plan: the first version.
        loader: loads further versions; None: the version cannot be changed.
        traces: records spans of traced requests; None: tracing is off.

    Attributes:
        driver: computes requests.
        manager: hosts the worlds of this leader's workers and frontends.
        desired: what the leaders of the group are to serve, as far as this one knows.
        served: what it serves.
        closed: why new requests are refused although replicas may be ready (draining, or unloaded); None if they are not.
        obstacle: why it cannot serve what is desired; empty if it does, or tries for the first time.
    """

    def __init__(
        self,
        model: ServedModel,
        plan: VersionPlan,
        settings: LeaderSettings,
        metrics: LeaderMetrics,
        *,
        loader: ModelSource | None = None,
        traces: BatchTraces | None = None,
    ) -> None:
        metrics.queue_limit.set(settings.queue_limit)
        self._settings = settings
        self._metrics = metrics
        self._versions = VersionTable(plan, model.name)
        self.manager = WorldManager(
            secret=settings.secret,
            verify_collectives=False,  # the message headers of the links carry the sizes
            **settings.heartbeats,
        )
        config = scheduler_config(settings, len(plan.stages))
        after_event = suppress_errors(lambda: self._registry.after_event())  # noqa: PLW0108 - it is made below
        self.driver = SchedulerDriver(model.name, config, metrics, self._versions, after_event, traces)
        self._registry: WorkerRegistry = WorkerRegistry(
            self._versions, settings, metrics, self.manager, self.driver, self._changed
        )
        self._operations = Operations(
            self._registry, self._versions, loader, settings.join_timeout_s, self._into_service
        )
        metrics.derived.register(PipelineCollector(self.snapshot, self.driver.scheduler.counters))
        self._frontends = FrontendSessions(settings, model, self, metrics)
        self.served = self.desired = Desired(0, plan.version)
        self.obstacle = ""
        self._following: asyncio.Task[None] | None = None
        self.closed: RequestRejected | None = None
        self._notices = Paced(self._notify, lambda: self._registry.placement.num_workers)
        self._started_s = time.monotonic()
        self._was_ready = False

    @property
    def join_port(self) -> int:
        """The port on which workers join; final after `async with` is entered."""
        return self._registry.port

    async def __aenter__(self) -> "Leader":
        self._registry.listen()
        self.manager.answer(self._settings.join_host, self.join_port, self._frontends.answer)
        self._frontends.start()
        self._changed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        await self._frontends.close()
        self.driver.close()
        if self._following is not None:
            self._following.cancel()
        self._operations.close()
        await self._registry.close()
        self._notices.cancel()
        await self.manager.aclose()

    # -- requests ------------------------------------------------------------------------------------------------------------

    @property
    def version(self) -> ModelVersion:
        """The version that serves new requests."""
        return self._versions.current.version

    @property
    def ready(self) -> bool:
        """Whether every stage has a ready replica, and requests are not refused."""
        return self.driver.scheduler.ready and self.closed is None

    def snapshot(self) -> PipelineSnapshot:
        """The state of the pipeline now. Cheap: may be called several times a second."""
        scheduler, rollout = self.driver.scheduler, self._registry.rollout
        return PipelineSnapshot(
            model=self._versions.model,
            version=self.version.name,
            ready=self.ready,
            draining=isinstance(self.closed, DrainingError),
            uptime_s=time.monotonic() - self._started_s,
            queue_depth=scheduler.queue_depth,
            requests_in_flight=scheduler.open_requests,
            stages=self._registry.stages(),
            spares=self._registry.spares(),
            version_number=self.version.number,
            version_loading=rollout.plan.version.name if rollout.plan else None,
            rollout=self._operations.progress,
            unloaded=isinstance(self.closed, NotReadyError),
        )

    def report_capacity(self) -> CapacityReport:
        """The replicas that the current load needs, and who serves. Sets the metric and what joining workers are placed by."""
        wanted, placement = self.driver.scheduler.replicas_wanted(time.monotonic()), self._registry.placement
        for index, replicas in enumerate(wanted):
            self._metrics.replicas_wanted.labels(index).set(replicas)
        placement.wanted = wanted
        stages = range(placement.num_stages)
        return CapacityReport(
            wanted, tuple(tuple(worker.name for worker in placement.ready(stage)) for stage in stages)
        )

    # -- joining -------------------------------------------------------------------------------------------------------------

    def offer_worker(self, request: JoinRequest, host: str) -> JoinOffer:
        """Answer the join request of a worker."""
        return self._registry.offer(request, host)

    # -- administration ------------------------------------------------------------------------------------------------------

    def restart_workers(self) -> AsyncGenerator[RestartStep, None]:
        """See `Operations.restart_workers`."""
        return self._operations.restart_workers()

    async def load_version(self, weights: str | None, revision: int = 0) -> ModelVersion:
        """Switch to another version without failing a request. Puts an unloaded model back into service.

        Args:
            weights: as accepted by the version loader; None: the weights of the settings.
            revision: of this operation, at least.
        Raises:
            OperationInProgressError, models.ModelError, VersionFailedError: nothing has changed.
        Cancelling is safe, see `Operations.load_version`.
        """
        revision = max(revision, self.desired.revision + 1)
        version = await self._operations.load_version(weights, lambda plan: Desired(revision, plan.version, weights))
        await self._frontends.inform()
        return version

    async def unload(self, revision: int = 0) -> None:
        """Reject new requests, and wait until the open ones are answered. Workers keep their versions.

        Raises:
            OperationInProgressError: another operation is in progress.
        """
        with self._operations.exclusive("unloading the model"):
            revision = max(revision, self.desired.revision + 1)
            self.desired = self.desired._replace(revision=revision, unloaded=True)
            self._take_out_of_service(self.desired)
        await self._wait_idle()

    def follow(self, desired: Desired) -> None:
        """Load and serve the version that another leader serves. Retries until it succeeds; meanwhile `obstacle` is the error.

        The version with the higher revision wins. If the revisions are equal and the contents differ, a leader that has served no
        request yet adopts the other leader's version.
        """
        has_begun = self.driver.requests.has_begun
        older, own = desired.rank < self.desired.rank, desired.rank == self.desired.rank and has_begun
        if older or own or desired == self.desired:
            return
        logger.info("another leader serves version %s: loading it revision=%d", desired.version.name, desired.revision)
        self.desired = desired
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow())
        self._changed()

    async def _follow(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while (desired := self.desired) != self.served:
            if desired.unloaded:
                self._take_out_of_service(desired)
                continue
            try:
                self._versions.agree(desired.version)
                await self._operations.load_version(desired.weights, partial(_check_content, desired))
            except OperationInProgressError:
                await asyncio.sleep(_FIRST_PAUSE_S)
            except Exception as error:  # noqa: BLE001 - whatever it is, other leaders serve
                self.obstacle = f"cannot serve version {desired.version.name} of the other leaders: {error}"
                logger.warning("this leader %s", self.obstacle)
                self._changed()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _take_out_of_service(self, desired: Desired) -> None:
        self.served = desired
        self.closed = self.closed or NotReadyError("the model is unloaded; an administrator must load it first")
        logger.warning("the model is unloaded: requests are refused until it is loaded")
        self._changed()

    def _into_service(self, desired: Desired) -> None:
        """The version of `desired` serves from now on."""
        self.served = desired
        self.desired, self.obstacle = max(self.desired, desired, key=lambda each: each.rank), ""
        if isinstance(self.closed, NotReadyError):
            self.closed = None
            logger.info("the model is in service again")
        self._changed()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait at most `timeout_s` until the open ones are answered."""
        open_rows = self.driver.requests.pending
        logger.info("stopping: waiting for %d open rows", len(open_rows))
        self._stop()
        self.driver.submit_event(Drain())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wait_idle()
        if open_rows:
            logger.warning("stopping with %d rows unanswered", len(open_rows))

    async def _wait_idle(self) -> None:
        """Wait until no request is open. Frontends first, because they may still have requests that they meant for this leader."""
        await self._frontends.inform()
        await self.driver.requests.wait_idle()

    def _stop(self) -> None:
        self.closed = DrainingError("the server is stopping and accepts no new requests; use another one")
        self._registry.stop()

    # -- changes -------------------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Tell the frontends soon, once for all changes until then."""
        self._notices.ask()

    def _notify(self) -> None:
        if self.ready and not self._was_ready:
            self._was_ready = True
            logger.info("leader ready after_s=%.1f", time.monotonic() - self._started_s)
        self._frontends.state_changed()


def _check_content(desired: Desired, plan: VersionPlan) -> Desired:
    """Raises VersionFailedError if a version that was read is not what the other leaders serve."""
    if plan.version.digest != desired.version.digest:
        raise VersionFailedError(
            f"what this leader reads as version {plan.version.name} has the digest {plan.version.digest}, not {desired.version.digest}; "
            "give all leaders the same file, or load a version with `multiworld load-version`"
        )
    return desired


def scheduler_config(settings: LeaderSettings, num_stages: int) -> SchedulerConfig:
    """The configuration of the scheduler."""
    return SchedulerConfig(
        num_stages=num_stages,
        max_batch_size=settings.max_batch_size,
        batch_timeout_s=settings.batch_timeout_s,
        queue_limit=settings.queue_limit,
        recovery_grace_s=settings.recovery_grace_s,
        hang_timeout_s=settings.hang_timeout_s,
        hedge_factor=settings.hedge_factor or None,
        target_latency_s=None if settings.target_latency_ms is None else settings.target_latency_ms / 1e3,
    )
