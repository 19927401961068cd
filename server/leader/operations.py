"""The operations of a leader: loading a version, restarting workers one after another, draining a host. One at a time."""

import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from functools import partial

from multiworld import Cause
from multiworld_serving.common.config.process import release_free_memory
from multiworld_serving.common.daemon_threads import DaemonThreads
from multiworld_serving.common.service.administration import (
    Desired,
    DrainError,
    OperationInProgressError,
    RestartFailedError,
    VersionFailedError,
)
from multiworld_serving.common.service.predictor import ModelVersion, RestartStep
from multiworld_serving.common.service.snapshots import RolloutProgress
from multiworld_serving.server.leader.replicas.registry import WorkerRegistry
from multiworld_serving.server.leader.replicas.worker import Worker
from multiworld_serving.server.leader.versions.model_source import ModelSource
from multiworld_serving.server.leader.versions.version_table import VersionPlan, VersionTable

logger = logging.getLogger(__name__)

_LEAVE_S = 60.0
"""A worker waits at most 30 s for its batches before it exits. After this time it counts as not responding."""
_REJOIN_S = 15.0
"""A worker without a link tries to join at least every 5 s."""


class Operations:
    """
    Args:
        loader: loads further versions; None: the version cannot be changed.
        timeout_s: longest wait for a worker to load its stage, or to join again.
        on_switch: called when a version serves, also if it is the current one.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        versions: VersionTable,
        loader: ModelSource | None,
        timeout_s: float,
        on_switch: Callable[[Desired], None],
    ) -> None:
        self._registry = registry
        self._versions = versions
        self._loader = loader
        self._timeout_s = timeout_s
        self._on_switch = on_switch
        self._running: str | None = None
        self._is_reading = False
        self._threads = DaemonThreads(1, "version", max_waiting=100)

    @contextlib.contextmanager
    def exclusive(self, operation: str) -> Iterator[None]:
        """Run one operation. Raises OperationInProgressError if another one runs, or workers have not unloaded a version yet."""
        if self._running is not None or not self._has_ended():
            what = self._running or "unloading a version"
            raise OperationInProgressError(f"{what} is in progress; wait until it has ended, then try again")
        self._running = operation
        try:
            yield
        finally:
            self._running = None

    def close(self) -> None:
        """Load no more versions. A thread that blocks while it reads a file is abandoned."""
        self._threads.close()

    @property
    def progress(self) -> RolloutProgress | None:
        """Of the rollout that is running; None if there is none."""
        return RolloutProgress("reading") if self._is_reading else self._registry.rollout.progress

    # -- loading a version ---------------------------------------------------------------------------------------------------

    async def load_version(
        self, weights: str | None, desire: Callable[[VersionPlan], Desired], *, follows: bool = False
    ) -> ModelVersion:
        """Switch to the version with these weights, and wait until the previous version is not used any more.

        Cancelling before the switch gives the version up, and nothing has changed. Cancelling after it does not undo it. In both cases
        other operations are rejected until the workers have unloaded what they need no more.

        Args:
            desire: makes what the switch is for, or raises VersionFailedError.
            follows: see `Rollout.run`.
        Raises:
            OperationInProgressError: another operation is in progress.
            models.ModelError: see `ModelSource.load`.
            VersionFailedError: a worker could not load it or failed the self-test, or too many were lost. Nothing has changed.
        """
        with self.exclusive("loading a version"):
            plan, began_s = await self._read(weights), time.monotonic()
            desired = desire(plan)
            if plan.number == self._versions.current.number:
                self._on_switch(desired)
                return plan.version
            try:
                await self._registry.rollout.run(plan, partial(self._on_switch, desired), follows=follows)
            except VersionFailedError:
                await self._registry.passes.until(self._has_ended)
                raise
            await self._registry.passes.until(self._has_ended)
            logger.info("rollout of version %s complete after %.1f s", plan.version.name, time.monotonic() - began_s)
            return plan.version

    async def _read(self, weights: str | None) -> VersionPlan:
        if self._loader is None:
            raise VersionFailedError("this service cannot load other versions: it was started without a version loader")
        self._is_reading = True
        self._registry.reconcile()
        try:
            return await self._threads.run(partial(self._loader.load, weights, self._versions))
        except MemoryError as error:
            raise VersionFailedError(f"the leader has not enough memory for another version: {error}") from error
        finally:
            self._is_reading = False
            release_free_memory()

    def _has_ended(self) -> bool:
        """Whether no worker loads or serves another version than the current one."""
        number, workers = self._versions.current.number, list(self._registry.placement.workers())
        serving = any(version != number for worker in workers for version in worker.replicas)
        loading = any(isinstance(worker.busy_with, int) for worker in workers)
        return self._versions.retiring is None and not serving and not loading

    # -- rolling restart -----------------------------------------------------------------------------------------------------

    async def restart_workers(self) -> AsyncGenerator[RestartStep, None]:
        """Restart the processes of all workers, including spares, each while all other replicas are ready.

        If the link of a process ends meanwhile, for example because the process is suspended, it is restarted after the others. A worker
        whose process is new needs no restart. Closing the iterator stops after the current worker.

        Raises:
            OperationInProgressError.
            RestartFailedError: names the workers that were not restarted.
        """
        with self.exclusive("a rolling restart"):
            slots = self._registry.placement.slots
            workers = {slot.worker.name: slot.worker for slot in slots if slot.worker and self._may_run(slot.worker)}
            number = 1
            try:
                for wait_s in (0.0, _REJOIN_S):
                    for name in [name for name, worker in workers.items() if self._may_run(worker)]:
                        try:
                            worker = workers[name] = await self._begin_restart(workers[name], wait_s)
                            if worker.busy_with != "restart":
                                continue
                            began_s, slot = time.monotonic(), worker.slot.name
                            yield RestartStep(name, slot, "restarting", number, len(workers))
                            left_s, back_s = await self._end_restart(worker, began_s)
                            if not self._may_run(worker):
                                yield RestartStep(name, slot, "restarted", number, len(workers), left_s, back_s)
                                number += 1
                        finally:
                            self._registry.goal.restart, workers[name].busy_with = None, None
                if any(map(self._may_run, workers.values())):
                    raise RestartFailedError(f"workers failed and have not joined again for {_REJOIN_S:g} s")
            except RestartFailedError as error:
                missed = ", ".join(name for name, worker in workers.items() if self._may_run(worker))
                raise RestartFailedError(f"{error}; not restarted: {missed}") from error

    # -- draining a host -----------------------------------------------------------------------------------------------------

    def check_other_hosts(self, drained: Collection[str]) -> None:
        """Raise DrainError if a stage with workers has no ready replica on a host that is not drained."""
        placement = self._registry.placement
        for stage in range(placement.num_stages):
            hosts = {worker.request.host for worker in placement.ready(stage)}
            if hosts and hosts <= set(drained):
                raise DrainError(
                    f"the ready replicas of stage {stage} are on {', '.join(sorted(hosts))} only; start a worker on another host first"
                )

    async def wait_left(self, host: str) -> None:
        """Wait until no worker of this host is connected. Raises DrainError."""
        registry = self._registry

        def of_host() -> list[str]:
            return [worker.name for worker in registry.placement.workers() if worker.request.host == host]

        try:
            await registry.passes.until(lambda: not of_host(), _LEAVE_S)
        except TimeoutError as error:
            raise DrainError(
                f"{', '.join(of_host())} of {host} did not leave within {_LEAVE_S:g} s; they leave when another host serves their stages, "
                "or use `multiworld drain --undo`"
            ) from error

    def _may_run(self, worker: Worker) -> bool:
        """Whether the process of this worker is connected, or has failed in a way that a process survives."""
        connected = self._registry.placement.live_worker(worker.name)
        if connected is not None:
            return connected.request.process == worker.request.process
        return worker.ending is None or worker.ending.cause not in (Cause.LEFT, Cause.EXIT)

    async def _begin_restart(self, worker: Worker, wait_s: float) -> Worker:
        """Wait until `reconcile` restarts this process.

        Returns the latest record of the process. It is not busy if the process has ended or is not connected after `wait_s`.
        """
        registry, name = self._registry, worker.name
        with contextlib.suppress(TimeoutError):
            await registry.passes.until(lambda: registry.placement.live_worker(name) is not None, wait_s)
        while (found := registry.placement.live_worker(name)) and found.request.process == worker.request.process:
            worker = registry.goal.restart = found
            registry.reconcile()
            await self._until(
                lambda worker=worker: worker.busy_with == "restart" or worker.state == "broken",  # type: ignore[misc]
                self._timeout_s,
                f"cannot restart {name}: a slot has had no ready replica",
            )
            if worker.busy_with == "restart":
                break
        return worker

    async def _end_restart(self, worker: Worker, began_s: float) -> tuple[float, float]:
        """Wait until it has left and a worker has joined instead. Returns after how many seconds each was."""

        def is_back() -> bool:
            placement = self._registry.placement
            joined_s = max((each.ready_at_s or 0.0 for each in placement.ready()), default=0.0)
            return placement.fully_replicated and joined_s > began_s

        await self._until(lambda: worker.state == "broken", _LEAVE_S, f"{worker.name} has not left")
        left_s = time.monotonic() - began_s
        complaint = (
            f"{worker.name} did not join again; whatever starts the worker must restart it when it exits. Waited"
        )
        await self._until(is_back, self._timeout_s, complaint)
        return round(left_s, 3), round(time.monotonic() - began_s, 3)

    async def _until(self, condition: Callable[[], bool], timeout_s: float, complaint: str) -> None:
        try:
            await self._registry.passes.until(condition, timeout_s)
        except TimeoutError as error:
            raise RestartFailedError(f"{complaint} for {timeout_s:g} s") from error
