"""Version rollout: switches the service to another version without failing a request.

    load, partition, compute the reference   in the leader; invalid weights fail here
    workers                                  load their stage of the new version beside the old one and pass the self-test
    switch                                   new requests use the new version; open requests end with the old one
    when the last of those has ended         workers free the old version

`reconcile` decides which worker loads when, and when to switch. The scheduler learns of the new version at the switch only. If a step
before it fails, workers free the new version and nothing has changed.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from multiworld import Cause
from multiworld_serving.common.service.administration import VersionFailedError
from multiworld_serving.common.service.snapshots import RolloutProgress
from multiworld_serving.server.leader.metrics import LeaderMetrics
from multiworld_serving.server.leader.replicas.placement import Placement
from multiworld_serving.server.leader.replicas.reconcile import Loading
from multiworld_serving.server.leader.replicas.worker import (
    LinkEndedError,
    SelfTestError,
)
from multiworld_serving.server.leader.replicas.worker_link import WorkerLink
from multiworld_serving.server.leader.versions.version_table import VersionPlan, VersionTable

logger = logging.getLogger(__name__)


class Rollout:
    """Of one version at a time.

    Args:
        timeout_s: longest wait for one worker to load its stage.
        on_change: called when something has changed that `reconcile` depends on.

    Attributes:
        plan: the version that is being loaded; None: there is none.
        loading: what `reconcile` needs to know of it.
    """

    def __init__(
        self,
        versions: VersionTable,
        placement: Placement,
        metrics: LeaderMetrics,
        timeout_s: float,
        on_change: Callable[[], None],
    ) -> None:
        self.plan: VersionPlan | None = None
        self.loading: Loading | None = None
        self._switched: asyncio.Future[None] | None = None
        self._on_switch: Callable[[], None] = lambda: None
        self._versions = versions
        self._placement = placement
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._on_change = on_change

    async def run(self, plan: VersionPlan, on_switch: Callable[[], None], *, follows: bool = False) -> None:
        """Have all workers load this version, and switch to it. Cancelling before the switch gives it up.

        Args:
            on_switch: called with the switch.
            follows: whether another leader serves it. Then this one switches at once, and its workers join again.
        Raises:
            VersionFailedError: a worker could not load it or failed the self-test, or too many were lost. Nothing has changed.
        """
        switched = asyncio.get_running_loop().create_future()
        self.plan, self._switched, self._on_switch = plan, switched, on_switch
        if self._placement.ready() and not follows:
            self.loading = Loading(plan.number, time.monotonic() + self._timeout_s)
        else:
            self.switch()
        self._on_change()
        try:
            await switched
        finally:
            self.give_up("the rollout was cancelled")

    def give_up(self, why: str) -> None:
        """Stop loading the version. Workers unload it."""
        if self.plan is not None and self._switched is not None:
            logger.warning("rollout of version %s failed: %s", self.plan.version.name, why)
            if not self._switched.done():
                self._switched.set_exception(VersionFailedError(f"version {self.plan.version.name} failed: {why}"))
            self.plan = self.loading = None
            self._on_change()

    def switch(self) -> None:
        """Send new requests to the version. Requests that have begun end with the former one."""
        assert self.plan is not None
        assert self._switched is not None, "a version is being loaded"
        plan, former, versions = self.plan, self._versions.current.version, self._versions
        self.plan = self.loading = None
        versions.switch_to(plan)
        self._metrics.version_changes.inc()
        names = former.name, former.number, plan.version.name, plan.number
        logger.info("version %s (number %d) -> %s (number %d)", *names)
        self._on_switch()
        if not self._switched.done():
            self._switched.set_result(None)

    async def load_on(self, link: WorkerLink) -> None:
        """Load the version on one worker. It serves its batches meanwhile."""
        plan, worker, began_s = self.plan, link.worker, time.monotonic()
        try:
            if plan is not None:
                async with asyncio.timeout(self._timeout_s):
                    await link.load(plan.stages_for(worker.slot.stage))
                loaded = *worker.id, worker.name, plan.version.name, time.monotonic() - began_s
                logger.info("world=%s generation=%d worker=%s loaded version %s after_s=%.3f", *loaded)
                if self.loading is not None:
                    self.loading.passed(time.monotonic() + self._timeout_s)
        except SelfTestError as error:
            self.give_up(str(error))
        except TimeoutError:
            why = f"worker {worker.name}: it has not loaded it within {self._timeout_s:g} s"
            link.fail(Cause.TIMEOUT, why)
            self.give_up(why)
        except LinkEndedError as error:
            leaves = worker.state == "draining" or (worker.ending is not None and worker.ending.cause == Cause.LEFT)
            if not leaves and self.loading is not None:
                logger.warning("a worker was lost while it loaded a version: %s", error)
                self.loading.lost(time.monotonic())
        finally:
            worker.busy_with = None
            self._on_change()

    @property
    def progress(self) -> RolloutProgress | None:
        """How far workers are with loading the version, or with ending requests of the former one; None if there is no rollout."""
        ready, plan = self._placement.ready(), self.plan or self._versions.current
        if self.plan is None and self._versions.retiring is None:
            return None
        busy = next((worker for worker in ready if worker.busy_with == plan.number), None)
        return RolloutProgress(
            phase="ending" if self.plan is None else "loading",
            worker=busy.name if busy else None,
            world=busy.id.world if busy else None,
            passed=tuple(worker.name for worker in ready if plan.number in worker.loaded),
            workers=len(ready),
        )
