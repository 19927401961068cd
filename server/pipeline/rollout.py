"""Version rollout: switches the service to other weights without failing a request.

    load, partition, compute the reference   in the leader; invalid weights fail here
    each worker in turn                      loads its stage of the new version beside the old one and passes the self-test
    switch                                   new requests use the new version; open requests end with the old one
    when the last of those has ended         workers free the old version

The scheduler learns of the new version at the switch only. If a step before it fails, workers free the new version and nothing has
changed. Workers load one at a time, because loading takes memory: if the kernel kills a process for lack of memory, it is one worker,
and its batches go to the other replicas.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from multiworld import Cause
from multiworld_serving.common.config import release_free_memory
from multiworld_serving.server.administration import Desired, VersionFailedError
from multiworld_serving.server.daemon_threads import DaemonThreads
from multiworld_serving.server.predictor import ModelVersion
from multiworld_serving.server.replicas.exclusive_operation import ExclusiveOperation
from multiworld_serving.server.replicas.link_types import AssignmentRefusedError, LinkEndedError, SelfTestError
from multiworld_serving.server.replicas.placement import Placement, ready_links
from multiworld_serving.server.replicas.worker_link import WorkerLink
from multiworld_serving.server.snapshots import RolloutProgress
from multiworld_serving.server.versions.version_table import Loader, VersionPlan, VersionTable

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_MAX_LOST = 3
"""A version fails if this many workers of a stage are lost while they load it, and none of the stage has loaded it."""
_CLOSE_S = 5.0
"""Longest wait for a cancelled rollout when the leader stops."""


class VersionSwitch(Protocol):
    """Switches requests to another version. Implemented by the leader."""

    def switch_to(self, plan: VersionPlan, desired: Desired) -> None:
        """Send new requests to `plan`, which may serve already, because of `desired`."""


class VersionRollout:
    """Runs at most one rollout at a time.

    Args:
        timeout_s: longest wait for one worker to load its stage.
        on_progress: called when `progress` has changed.

    Attributes:
        loading: the name of the version that workers are loading; None if there is none.
        progress: of the rollout that is running; None if there is none.
    """

    def __init__(
        self,
        switch: VersionSwitch,
        placement: Placement,
        versions: VersionTable,
        loader: Loader | None,
        timeout_s: float,
        exclusive: ExclusiveOperation,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.loading: str | None = None
        self.progress: RolloutProgress | None = None
        self._switch = switch
        self._placement = placement
        self._versions = versions
        self._loader = loader
        self._timeout_s = timeout_s
        self._exclusive = exclusive
        self._on_progress = on_progress
        self._lost: Counter[int | None] = Counter()
        """Workers of each stage that were lost while they loaded the version."""
        self._retired = asyncio.Event()
        self._cancelled = asyncio.Event()
        self._changes: set[asyncio.Task[ModelVersion]] = set()

    async def run(self, weights: str | None, desire: Callable[[VersionPlan], Desired]) -> ModelVersion:
        """Switch to the version with these weights, and wait until the previous version is not used any more.

        `desire` makes what the switch is for, or raises VersionFailedError.

        Cancelling before the switch cancels the rollout: it ends when the current load (of the file, or of one worker) has finished, and
        nothing has changed. Until then other operations are rejected. Cancelling after the switch does not undo it.

        Raises:
            OperationInProgressError: another operation is in progress.
            models.ModelError: see `Loader.load`.
            VersionFailedError: a worker could not load it, or failed the self-test.
        """
        cancelled = asyncio.Event()
        change = asyncio.create_task(self._change(weights, desire, cancelled))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        try:
            return await asyncio.shield(change)
        finally:
            cancelled.set()

    async def close(self) -> None:
        """Cancel the running rollout. A thread that blocks while it reads a file is abandoned."""
        self._cancelled.set()
        if changes := set(self._changes):
            _, unfinished = await asyncio.wait(changes, timeout=_CLOSE_S)
            for change in unfinished:
                change.cancel()
            await asyncio.gather(*changes, return_exceptions=True)

    async def _change(
        self, weights: str | None, desire: Callable[[VersionPlan], Desired], cancelled: asyncio.Event
    ) -> ModelVersion:
        with self._exclusive.acquire("loading a version"), self._showing_progress():
            self._cancelled = cancelled
            plan = await self._plan(weights)
            desired = desire(plan)
            if plan.number == self._versions.current.number:
                self._switch.switch_to(plan, desired)
                return plan.version
            began_s = time.monotonic()
            self.loading = plan.version.name
            self._lost.clear()
            try:
                await self._load_on_all_stages(plan)
            except BaseException as error:
                logger.warning("rollout of version %s failed: %s", plan.version.name, error or type(error).__name__)
                for link in self._links():
                    link.unload(plan.number)
                raise
            finally:
                self.loading = None
            self._switch.switch_to(plan, desired)
            self._report(replace(self._progress_of(plan), phase="ending"))
            await self._until_retired()
            logger.info("rollout of version %s complete after %.1f s", plan.version.name, time.monotonic() - began_s)
            return plan.version

    @contextlib.contextmanager
    def _showing_progress(self) -> Iterator[None]:
        self._report(RolloutProgress("reading"))
        try:
            yield
        finally:
            self._report(None)

    def _report(self, progress: RolloutProgress | None) -> None:
        self.progress = progress
        self._on_progress()

    def _progress_of(self, plan: VersionPlan) -> RolloutProgress:
        """The workers that have loaded it already, while none is loading."""
        links = self._links()
        passed = tuple(link.worker for link in links if plan.number in link.loaded_plans)
        return RolloutProgress("loading", passed=passed, workers=len(links))

    async def _plan(self, weights: str | None) -> VersionPlan:
        if self._loader is None:
            raise VersionFailedError("this service cannot load other versions: it was started without a version loader")
        threads = DaemonThreads(1, "version")
        loading = asyncio.create_task(threads.run(partial(self._loader.load, weights, self._versions)))
        # Retrieve the exception, because after a cancel no one awaits the future.
        loading.add_done_callback(lambda done: done.cancelled() or done.exception())
        loading.add_done_callback(lambda _: threads.close())
        cancelled = asyncio.create_task(self._cancelled.wait())
        ends: set[asyncio.Future[Any]] = {loading, cancelled}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                await asyncio.wait({loading}, timeout=self._timeout_s)
            self._raise_if_cancelled()
            return loading.result()
        except MemoryError as error:
            raise VersionFailedError(f"the leader has not enough memory for another version: {error}") from error
        finally:
            cancelled.cancel()
            loading.cancel()
            release_free_memory()

    def _raise_if_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise VersionFailedError("the rollout was cancelled")

    async def _load_on_all_stages(self, plan: VersionPlan) -> None:
        """Load the version on all ready workers, and wait until every stage has a worker that has loaded it.

        A worker that joins meanwhile loads the old version first, to serve at once, and then the new one. A worker that is still joining
        at the switch has the old version only; the registry makes it join again. Without workers, nothing serves the old version.
        """
        if not self._links():
            return
        deadline_s = time.monotonic() + self._timeout_s
        await self._load_on_ready_workers(plan)
        while missing := [
            stage for stage in range(self._placement.num_stages) if not self._has_loaded(stage, plan.number)
        ]:
            if time.monotonic() > deadline_s:
                raise VersionFailedError(
                    f"no worker of stage {missing[0]} has loaded {plan.version.name} within {self._timeout_s:g} s"
                )
            await asyncio.sleep(_POLL_S)
            self._raise_if_cancelled()
            await self._load_on_ready_workers(plan)
        self._raise_if_cancelled()

    async def _load_on_ready_workers(self, plan: VersionPlan) -> None:
        """Load the version on all ready workers, one after another. Workers that are lost load it when they have joined again."""
        number, refusal = plan.number, None
        deadline_s = time.monotonic() + self._timeout_s
        while (link := next((link for link in self._links() if number not in link.loaded_plans), None)) is not None:
            self._raise_if_cancelled()
            self._report(replace(self._progress_of(plan), worker=link.worker, world=link.world_name))
            try:
                await self._load(link, plan)
                deadline_s = time.monotonic() + self._timeout_s
            except AssignmentRefusedError as error:
                refusal = error
            except LinkEndedError as error:
                if link.state == "draining" or link.cause == Cause.LEFT:
                    continue  # it leaves on purpose: the version is not the reason
                stage = link.slot.stage
                self._lost[stage] += 1
                harmless = stage is None or self._has_loaded(stage, number)
                if time.monotonic() > deadline_s or (self._lost[stage] >= _MAX_LOST and not harmless):
                    raise VersionFailedError(
                        f"workers are lost while they load {plan.version.name}: {error}"
                    ) from error
                logger.warning("worker=%s was lost while it loaded version %s", link.worker, plan.version.name)
            finally:
                self._report(self._progress_of(plan))
        if refusal is not None and not any(number in link.loaded_plans for link in self._links()):
            raise VersionFailedError(f"{refusal}; load {plan.version.name} there")

    async def _load(self, link: WorkerLink, plan: VersionPlan) -> None:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                await link.load(plan.stages_for(link.slot.stage))
        except SelfTestError as error:
            raise VersionFailedError(f"version {plan.version.name} failed: {error}") from error
        except TimeoutError as error:
            detail = f"it has not loaded {plan.version.name} within {self._timeout_s:g} s"
            link.fail(Cause.TIMEOUT, detail)
            raise VersionFailedError(f"version {plan.version.name} failed: worker {link.worker}: {detail}") from error
        logger.info(
            "world=%s generation=%d worker=%s loaded version %s after_s=%.3f",
            *(link.world_name, link.generation, link.worker, plan.version.name, time.monotonic() - began_s),
        )

    async def _until_retired(self) -> None:
        """Wait until the previous version is retired. Bounded, because requests have deadlines and silent links are broken."""
        self._retired.clear()
        self.check_retired()
        await self._retired.wait()

    def check_retired(self) -> None:
        """Check whether the previous version is retired. Called after every event."""
        if self._retired.is_set():
            return
        current = self._versions.current.number
        if self._versions.retiring is None and not any(link.active_plans - {current} for link in self._links()):
            self._retired.set()

    def _links(self) -> list[WorkerLink]:
        return ready_links((*self._placement.all, *self._placement.spares))

    def _has_loaded(self, stage: int, number: int) -> bool:
        return any(number in link.loaded_plans for link in ready_links(self._placement.of_stage(stage)))
