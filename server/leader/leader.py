"""The leader: connects the scheduler to the workers, and computes the requests of frontends.

The scheduler (through `pipeline/driver.py`) decides about requests and batches. `replicas/reconcile.py` decides what each worker holds,
and `replicas/registry.py` performs it.
"""

import asyncio
import contextlib
import logging
import time
from types import TracebackType

from multiworld import WorldManager
from multiworld_serving.common.observers import suppress_errors
from multiworld_serving.common.service.capacity_report import CapacityReport
from multiworld_serving.common.service.predictor import ServedModel
from multiworld_serving.common.service.snapshots import PipelineSnapshot
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.common.wire.join import JoinOffer, JoinRequest
from multiworld_serving.models.bundle.nodes import BATCH
from multiworld_serving.server.leader.metrics import LeaderMetrics, PipelineCollector
from multiworld_serving.server.leader.pipeline.driver import SchedulerDriver
from multiworld_serving.server.leader.replicas import status
from multiworld_serving.server.leader.replicas.paced import Paced
from multiworld_serving.server.leader.replicas.registry import WorkerRegistry
from multiworld_serving.server.leader.scheduling.config import (
    FAST_BATCH_SIZE,
    SLOW_BATCH_SIZE,
    WINDOW,
    SchedulerConfig,
)
from multiworld_serving.server.leader.scheduling.events import Drain
from multiworld_serving.server.leader.serving import Serving
from multiworld_serving.server.leader.sessions import FrontendSessions
from multiworld_serving.server.leader.versions.model_source import ModelSource
from multiworld_serving.server.leader.versions.pipeline_plan import pipeline_limits
from multiworld_serving.server.leader.versions.version_table import VersionPlan, VersionTable

logger = logging.getLogger(__name__)


class Leader:
    """One leader. Use as `async with`: it listens on entry and frees everything on exit.

    Args:
        plan: the first version.
        loader: loads further versions; None: the version cannot be changed.

    Attributes:
        driver: computes requests.
        manager: hosts the worlds of this leader's workers and frontends.
        serving: what it serves, and the operations that change it.
    """

    def __init__(
        self,
        model: ServedModel,
        plan: VersionPlan,
        settings: LeaderSettings,
        metrics: LeaderMetrics,
        *,
        loader: ModelSource | None = None,
    ) -> None:
        metrics.queue_limit.set(settings.queue_limit)
        self._settings = settings
        self._metrics = metrics
        self._versions = VersionTable(plan)
        self.manager = WorldManager(
            secret=settings.secret,
            verify_collectives=False,  # the message headers of the links carry the sizes
            **settings.heartbeats,
        )
        config = scheduler_config(settings, plan, *pipeline_limits(model))
        after_event = suppress_errors(lambda: self._registry.after_event())  # noqa: PLW0108 - it is made below
        self.driver = SchedulerDriver(model.name, config, metrics, self._versions, after_event)
        self._registry: WorkerRegistry = WorkerRegistry(
            self._versions, settings, metrics, self.manager, self.driver, self._changed
        )
        self._frontends = FrontendSessions(settings, model, self, metrics)
        self.serving = Serving(
            *(self._registry, self._versions, loader, settings.join_timeout_s, self.driver.requests),
            *(self._frontends.inform, self._changed),
        )
        metrics.derived.register(PipelineCollector(self.snapshot, self.driver.scheduler.counters))
        self._notices = Paced(self._notify, self._registry.placement.num_workers)
        self._started_s = time.monotonic()
        self._was_ready = False

    @property
    def join_port(self) -> int:
        """The port on which workers join; final after `async with` is entered."""
        return self._registry.joining.port

    async def __aenter__(self) -> "Leader":
        self._registry.joining.listen()
        self.manager.answer(self._settings.join_host, self.join_port, self._frontends.answer)
        self._frontends.start()
        self._changed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._registry.stop()
        await self._frontends.close()
        self.driver.close()
        self.serving.close()
        await self._registry.close()
        self._notices.cancel()
        await self.manager.aclose()

    # -- requests ------------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether every stage has a ready replica, and requests are not refused."""
        return self.driver.scheduler.ready and not (self.serving.draining or self.serving.served.unloaded)

    @property
    def available(self) -> bool:
        """Whether it serves, or would if it had workers."""
        return not (self.serving.draining or self.serving.served.unloaded or self.serving.obstacle)

    def snapshot(self) -> PipelineSnapshot:
        """The state of the pipeline now. Cheap: may be called several times a second."""
        scheduler, rollout, placement = self.driver.scheduler, self._registry.rollout, self._registry.placement
        version = self._versions.current.version
        return PipelineSnapshot(
            model=self._frontends.model.name,
            version=version.name,
            ready=self.ready,
            draining=self.serving.draining,
            uptime_s=time.monotonic() - self._started_s,
            queue_depth=scheduler.queue_depth,
            requests_in_flight=scheduler.open_requests,
            stages=status.stages(self._versions, placement, self.driver),
            spares=status.spares(placement, self.driver),
            version_number=version.number,
            version_loading=rollout.plan.version.name if rollout.plan else None,
            rollout=self.serving.operations.progress,
            unloaded=self.serving.served.unloaded,
            drained=self.serving.desired.drained,
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

    # -- the end -------------------------------------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let workers join other leaders, and wait at most `timeout_s` until the open requests are answered."""
        open_rows = self.driver.requests.pending
        logger.info("stopping: waiting for %d open rows", len(open_rows))
        self.serving.draining = True
        self._registry.drain()
        self.driver.submit_event(Drain())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.serving.wait_idle()
        if open_rows:
            logger.warning("stopping with %d rows unanswered", len(open_rows))

    # -- changes -------------------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Tell the frontends soon, once for all changes until then."""
        self._notices.ask()

    def _notify(self) -> None:
        if self.ready and not self._was_ready:
            self._was_ready = True
            logger.info("leader ready after_s=%.1f", time.monotonic() - self._started_s)
        self._frontends.state_changed()


def scheduler_config(
    settings: LeaderSettings, plan: VersionPlan, wait_s: float = 0.0, concurrency: int = 1
) -> SchedulerConfig:
    """The configuration of the scheduler. `wait_s` and `concurrency` are those of a pipeline in Python."""
    largest = plan.stages[0].spec.dimensions[BATCH][1]  # of all versions
    # Each size is compiled, which takes up to a minute.
    fast = SLOW_BATCH_SIZE if settings.optimize == "compile" else FAST_BATCH_SIZE
    return SchedulerConfig(
        num_stages=len(plan.stages),
        max_batch_size=settings.max_batch_size or min(fast, largest),
        slow_batch_size=settings.max_batch_size or min(SLOW_BATCH_SIZE, largest),
        batch_timeout_s=max(settings.batch_timeout_s, wait_s),
        window=max(WINDOW, concurrency),
        queue_limit=settings.queue_limit,
        recovery_grace_s=settings.recovery_grace_s,
        hang_timeout_s=settings.hang_timeout_s,
        hedge_factor=settings.hedge_factor or None,
    )
