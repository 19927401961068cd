"""The leader: connects the scheduler to the worker registry, and computes the requests of frontends.

The scheduler (through `pipeline/driver.py`) decides about requests and batches. The registry (`replicas/registry.py`) decides which worker
serves which stage. Versions are switched by `pipeline/rollout.py`.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType

from multiworld import WorldManager
from multiworld_serving.common.observers import suppress_errors
from multiworld_serving.common.wire.message import Message
from multiworld_serving.server.administration import Desired, OperationInProgressError, RestartStep, VersionFailedError
from multiworld_serving.server.capacity_report import CapacityReport
from multiworld_serving.server.drain import OpenRequests
from multiworld_serving.server.errors import RequestRejected
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.observability.leader_metrics import LeaderMetrics, PipelineCollector
from multiworld_serving.server.pipeline.batch_tensors import InputRow
from multiworld_serving.server.pipeline.batch_traces import BatchTraces
from multiworld_serving.server.pipeline.driver import SchedulerDriver
from multiworld_serving.server.pipeline.driver_context import DriverContext
from multiworld_serving.server.pipeline.edge_routing import EdgeRouting
from multiworld_serving.server.pipeline.rollout import VersionRollout
from multiworld_serving.server.predictor import ModelVersion, Prediction
from multiworld_serving.server.readiness import readiness_error
from multiworld_serving.server.replicas.exclusive_operation import ExclusiveOperation
from multiworld_serving.server.replicas.placement import ready_links
from multiworld_serving.server.replicas.registry import WorkerRegistry
from multiworld_serving.server.replicas.replica_ids import (
    activate,
    busy_events,
    draining_events,
    link_id,
    lost_events,
    plan_number,
    replica_id,
    replica_ids,
)
from multiworld_serving.server.replicas.rolling_restart import RollingRestart
from multiworld_serving.server.replicas.worker_link import WorkerLink
from multiworld_serving.server.scheduling.events import Drain, ReplicaDraining, ReplicaId
from multiworld_serving.server.snapshots import PipelineSnapshot
from multiworld_serving.server.versions.version_table import Loader, VersionPlan, VersionTable

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""Between attempts to load what the other leaders serve."""


class Leader:
    """One leader. Use as `async with`: it listens on entry and frees everything on exit.

    Args:
        model: the name of the model.
        plan: the first version.
        loader: loads further versions; None: the version cannot be changed.
        traces: records spans of traced requests; None: tracing is off.
        on_change: called after every state change of a replica and every change of the version. Exceptions are logged and ignored.

    Attributes:
        open_requests: requests that have begun; `drain` waits for them.
        desired: what the leaders of the group are to serve, as far as this one knows.
        served: what it serves.
        obstacle: why it cannot serve what is desired; empty if it does, or tries for the first time.
    """

    def __init__(
        self,
        model: str,
        plan: VersionPlan,
        settings: LeaderSettings,
        metrics: LeaderMetrics,
        *,
        loader: Loader | None = None,
        traces: BatchTraces | None = None,
        on_change: Callable[[PipelineSnapshot], None] = lambda _snapshot: None,
    ) -> None:
        self._model = model
        self._settings = settings
        self._metrics = metrics
        metrics.queue_limit.set(settings.queue_limit)
        self._on_change = suppress_errors(on_change)
        self._versions = VersionTable(plan)
        self._manager = WorldManager(
            secret=settings.secret,
            verify_collectives=False,  # the message headers of the links carry the sizes
            **settings.heartbeats,
        )
        self._registry = WorkerRegistry(
            plan, settings, metrics, self._manager, self, suppress_errors(self._states_changed)
        )
        context = DriverContext(
            model=model,
            find_plan=self._versions.plan,
            find_link=self._registry.link,
            on_released=self._on_released,
            after_event=suppress_errors(self._after_event),
            traces=traces,
        )
        self._driver = SchedulerDriver(settings, len(plan.stages), metrics, context)
        metrics.derived.register(PipelineCollector(metrics, self.snapshot, self._driver.scheduler.counters.hedges))
        self._exclusive = ExclusiveOperation()
        self._rolling_restart = RollingRestart(self._registry.placement, settings.join_timeout_s, self._exclusive)
        self._rollout = VersionRollout(
            self,
            self._registry.placement,
            self._versions,
            loader,
            settings.join_timeout_s,
            self._exclusive,
            self._states_changed,
        )
        self.open_requests = OpenRequests()
        self.desired = Desired(0, plan.version, plan.digest)
        self.obstacle = ""
        self._following: asyncio.Task[None] | None = None
        self.served = self.desired
        self._has_begun = False
        self._draining = False
        self._unloaded = False
        self._started_s = time.monotonic()

    @property
    def join_port(self) -> int:
        """The port on which workers join; final after `async with` is entered."""
        return self._registry.port

    async def __aenter__(self) -> "Leader":
        self._registry.listen()
        self.answer(self._registry.offer)
        self._metrics.version_serves(self._model, self._versions.current.version)
        self._states_changed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._draining = True
        self._driver.close()
        if self._following is not None:
            self._following.cancel()
        await self._rollout.close()
        await self._registry.close()
        await self._manager.aclose()

    # -- Pipeline ------------------------------------------------------------------------------------------------------------

    def begin(
        self, rows: Sequence[InputRow], *, deadline_s: float, request_id: str, fetcher: str | None = None, key: str = ""
    ) -> asyncio.Future[Prediction]:
        """See `SchedulerDriver.begin`."""
        self._has_begun = True
        return self._driver.begin(rows, deadline_s=deadline_s, request_id=request_id, fetcher=fetcher, key=key)

    @property
    def edge_routing(self) -> EdgeRouting:
        """Knows which processes cannot reach each other."""
        return self._driver.edges

    @property
    def version(self) -> ModelVersion:
        """See `Predictor.version`."""
        return self._versions.current.version

    @property
    def ready(self) -> bool:
        """See `Pipeline.ready`."""
        return self._driver.scheduler.ready and not self._draining and not self._unloaded

    def snapshot(self) -> PipelineSnapshot:
        """See `Pipeline.snapshot`."""
        scheduler = self._driver.scheduler
        stages = tuple(
            replace(stage, rerouted=self._metrics.reroutes[stage.index])
            for stage in self._registry.stages(self._in_flight)
        )
        return PipelineSnapshot(
            model=self._model,
            version=self.version.name,
            ready=self.ready,
            draining=self._draining,
            uptime_s=time.monotonic() - self._started_s,
            queue_depth=scheduler.queue_depth,
            requests_in_flight=scheduler.open_requests,
            stages=stages,
            spares=self._registry.spares(),
            version_number=self.version.number,
            version_loading=self._rollout.loading,
            rollout=self._rollout.progress,
            unloaded=self._unloaded,
        )

    def report_capacity(self) -> CapacityReport:
        """The replicas that the current load needs, and who serves. Sets the metric and what joining workers are placed by."""
        wanted, placement = self._driver.scheduler.replicas_wanted(time.monotonic()), self._registry.placement
        for index, replicas in enumerate(wanted):
            self._metrics.replicas_wanted.labels(index).set(replicas)
        placement.wanted = wanted
        stages = range(placement.num_stages)
        return CapacityReport(
            wanted, tuple(tuple(link.worker for link in ready_links(placement.of_stage(stage))) for stage in stages)
        )

    def rejection(self, deadline_s: float, ahead: int) -> RequestRejected | None:
        """Why a request would be refused now; None if it would be accepted. See `Predictor.check`."""
        found = self._driver.scheduler.rejection(deadline_s, time.monotonic(), ahead=ahead)
        if found is None:
            return None
        return RequestRejected.for_reason(found.reason, found.detail, retry_after_s=found.retry_after_s)

    def closed_error(self) -> RequestRejected | None:
        """Why new requests are refused although replicas may be ready (draining, or unloaded); None if they are not."""
        return readiness_error(self.snapshot()) if self._unloaded or self._draining else None

    # -- administration ------------------------------------------------------------------------------------------------------

    def restart_workers(self) -> AsyncGenerator[RestartStep, None]:
        """Restart every worker in turn while the others serve; yields each step. Raises OperationInProgressError, RestartFailedError."""
        return self._rolling_restart.run()

    @property
    def manager(self) -> WorldManager:
        """Hosts the worlds of this leader's workers and frontends."""
        return self._manager

    def answer(self, answerer: Callable[[str, str], Awaitable[bytes]]) -> None:
        """Answer join requests with `answerer` from now on; until then only workers are answered."""
        self._manager.answer(self._settings.join_host, self.join_port, answerer)

    async def offer_worker(self, question: str, host: str) -> bytes:
        """Answer the join request of a worker."""
        return await self._registry.offer(question, host)

    def set_accepted_secrets(self, *secrets: bytes) -> None:
        """Accept only these secrets from joining workers. Connected workers stay connected."""
        self._manager.set_accepted_secrets(*secrets)

    async def load_version(self, weights: str | None, revision: int = 0) -> ModelVersion:
        """Switch to another version without failing a request. Puts an unloaded model back into service.

        Args:
            weights: as accepted by the version loader; None: the weights of the settings.
            revision: of this operation, at least.
        Raises:
            OperationInProgressError, models.ModelError, VersionFailedError: nothing has changed.
        Cancelling is safe, see `VersionRollout.run`.
        """
        revision = max(revision, self.desired.revision + 1)
        version = await self._rollout.run(weights, lambda plan: Desired(revision, plan.version, plan.digest, weights))
        await self.open_requests.sync_state()
        return version

    async def unload(self, revision: int = 0) -> None:
        """Reject new requests, and wait until the open ones are answered. Workers keep their versions.

        Raises:
            OperationInProgressError: another operation is in progress.
        """
        with self._exclusive.acquire("unloading the model"):
            revision = max(revision, self.desired.revision + 1)
            self.desired = self.desired._replace(revision=revision, unloaded=True)
            self._take_out_of_service(self.desired)
        await self.open_requests.wait_idle()

    def follow(self, desired: Desired) -> None:
        """Serve what another leader serves. While that fails, it is tried again, and `obstacle` says why.

        A leader that has begun no request also yields to one that serves other content as the version of the settings.
        """
        older, own = desired.rank < self.desired.rank, desired.rank == self.desired.rank and self._has_begun
        if older or own or desired == self.desired:
            return
        logger.info("another leader serves version %s: loading it revision=%d", desired.version.name, desired.revision)
        self.desired = desired
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow())
        self._states_changed()

    async def _follow(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while (desired := self.desired) != self.served:
            if desired.unloaded:
                self._take_out_of_service(desired)
                continue
            try:
                self._versions.agree(desired.version)
                await self._rollout.run(desired.weights, partial(_check_content, desired))
            except OperationInProgressError:
                await asyncio.sleep(_FIRST_PAUSE_S)
            except Exception as error:  # noqa: BLE001 - whatever it is, other leaders serve
                self.obstacle = f"cannot serve version {desired.version.name} of the other leaders: {error}"
                logger.warning("this leader %s", self.obstacle)
                self._states_changed()
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _take_out_of_service(self, desired: Desired) -> None:
        self.served, self._unloaded = desired, True
        logger.warning("the model is unloaded: requests are refused until it is loaded")
        self._states_changed()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait at most `timeout_s` until the open ones are answered."""
        logger.info("stopping: waiting for %d open requests", self.open_requests.count)
        self._draining = True
        self._registry.stop()
        self._driver.submit_event(Drain(admits=True))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await (
                    self.open_requests.wait_idle()
                )  # includes requests that are being read or decoded and have not reached the scheduler
        self._driver.submit_event(Drain())
        if self.open_requests.count:
            logger.warning("stopping with %d requests unanswered", self.open_requests.count)

    # -- WorkerEvents --------------------------------------------------------------------------------------------------------

    def on_serving(self, link: WorkerLink) -> None:
        """See `WorkerEvents`."""
        for event in activate(link, self._versions):
            self._driver.submit_event(event)

    def on_leaving(self, link: WorkerLink) -> None:
        """See `WorkerEvents`."""
        for event in draining_events(link):
            self._driver.submit_event(event)
        if not link.active_plans:
            link.close()

    def on_ended(self, link: WorkerLink) -> None:
        """See `WorkerEvents`."""
        for event in lost_events(link):
            self._driver.submit_event(event)
        link.active_plans.clear()
        self._driver.on_ended(link)

    def on_result(self, link: WorkerLink, message: Message) -> None:
        """See `BatchListener`."""
        self._driver.on_result(link, message)

    def on_failed(self, link: WorkerLink, message: Message) -> None:
        """See `BatchListener`."""
        self._driver.on_failed(link, message)

    def on_input_lost(self, link: WorkerLink, message: Message) -> None:
        """See `BatchListener`."""
        self._driver.on_input_lost(link, message)

    def on_busy(self, link: WorkerLink) -> None:
        """See `BatchListener`."""
        for event in busy_events(link):
            self._driver.submit_event(event)

    # -- versions --------------------------------------------------------------------------------------------------------------

    def switch_to(self, plan: VersionPlan, desired: Desired) -> None:
        """Send new requests to `plan`, which the serving links have loaded. Requests that have begun end with the old version."""
        self.served = desired
        self.desired, self.obstacle = max(self.desired, desired, key=lambda each: each.rank), ""
        if self._unloaded:
            self._unloaded = False
            logger.info("the model is in service again")
        if plan is not self._versions.current:
            self._switch_to(plan)
        self._states_changed()

    def _switch_to(self, plan: VersionPlan) -> None:
        former = self.version
        forgotten = self._versions.switch_to(plan)
        self._registry.use(plan)
        logger.info("version %s (number %d) -> %s (number %d)", former.name, former.number, *reversed(plan.version))
        for link in self._registry.serving():
            if link.state == "ready":  # a draining link must not get new batches, or it would never become empty
                self.on_serving(link)
        self._metrics.version_serves(self._model, plan.version)
        for version in forgotten:
            self._metrics.version_retired(self._model, version)

    def _after_event(self) -> None:
        """Retire the previous version when its last batch has ended."""
        self._rollout.check_retired()
        retiring, scheduler = self._versions.retiring, self._driver.scheduler
        if retiring is None or scheduler.current_version != self._versions.current.key:
            return
        if not scheduler.batches_of(retiring.key):
            self._versions.retiring = None
            self._retire(retiring.number)

    def _retire(self, number: int) -> None:
        for slot in (*self._registry.placement.all, *self._registry.placement.spares):
            link = slot.link
            if link is None or slot.free:
                continue
            if number in link.active_plans:
                self._driver.submit_event(ReplicaDraining(replica_id(link, number)))
            elif number in link.loaded_plans:
                link.unload(number)

    def _on_released(self, replica: ReplicaId) -> None:
        link = self._registry.link(link_id(replica))
        if link is None:
            return
        number = plan_number(replica)
        link.active_plans.discard(number)
        if number != self._versions.current.number and link.state == "ready":
            link.unload(number)
        elif not link.active_plans:
            link.close()

    def _in_flight(self, link: WorkerLink) -> int:
        return sum(self._driver.scheduler.in_flight(replica) for replica in replica_ids(link))

    def _states_changed(self) -> None:
        snapshot = self.snapshot()
        self._metrics.quarantined.set(self._registry.quarantined())
        self._on_change(snapshot)


def _check_content(desired: Desired, plan: VersionPlan) -> Desired:
    """Raises VersionFailedError if a version that was read is not what the other leaders serve."""
    if plan.digest != desired.digest:
        raise VersionFailedError(
            f"what this leader reads as version {plan.version.name} has the digest {plan.digest}, not {desired.digest}; "
            "give all leaders the same file, or load a version with `multiworld load-version`"
        )
    return desired
