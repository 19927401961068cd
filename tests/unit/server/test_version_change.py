"""Cancelled rollouts: nothing of the new version stays, and nothing else is affected."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import cast

import pytest

from multiworld_serving.server.administration import Desired, OperationInProgressError, VersionFailedError
from multiworld_serving.server.pipeline.rollout import VersionRollout
from multiworld_serving.server.predictor import ModelVersion
from multiworld_serving.server.replicas.exclusive_operation import ExclusiveOperation
from multiworld_serving.server.replicas.link_types import LinkEndedError
from multiworld_serving.server.replicas.placement import Placement, Slot
from multiworld_serving.server.replicas.worker_link import WorkerLink
from multiworld_serving.server.snapshots import RolloutProgress
from multiworld_serving.server.versions.bundle_loader import BundleLoader
from multiworld_serving.server.versions.stage_plan import StagePlan
from multiworld_serving.server.versions.version_table import VersionPlan, VersionTable


@dataclass
class Worker:
    """A ready link as the rollout sees it. It loads when it is told to proceed."""

    slot: Slot
    state: str = "ready"
    cause: str | None = None
    loaded_plans: set[int] = field(default_factory=lambda: {1})
    active_plans: set[int] = field(default_factory=lambda: {1})
    dropped: list[int] = field(default_factory=list)
    loading: asyncio.Event = field(default_factory=asyncio.Event)
    proceed: asyncio.Event = field(default_factory=asyncio.Event)
    worker: str = "w"
    world_name: str = "s0.r0"
    generation: int = 1
    lost: int = 0
    """How often it is lost while it loads, and joins again at once."""

    async def load(self, plans: object) -> None:
        self.loading.set()
        await self.proceed.wait()
        if self.lost:
            self.lost -= 1
            raise LinkEndedError("gone")
        self.loaded_plans.add(2)

    def unload(self, version: int) -> None:
        self.loaded_plans.discard(version)
        self.dropped.append(version)


class Loader:
    """Builds version 2 when it is told to proceed."""

    def __init__(self) -> None:
        self.begun, self.proceed = threading.Event(), threading.Event()

    def load(self, weights: str | None, versions: VersionTable) -> VersionPlan:
        self.begun.set()
        self.proceed.wait()
        return plan(2)


def plan(number: int) -> VersionPlan:
    return VersionPlan(ModelVersion(number, f"v{number}"), (cast(StagePlan, None),))


def desire(plan: VersionPlan) -> Desired:
    return Desired(1, plan.version, plan.digest)


class Service:
    """A rollout among two workers."""

    def __init__(self) -> None:
        self.placement = Placement(1, 2)
        self.workers = [Worker(slot) for slot in self.placement.all]
        for slot, worker in zip(self.placement.all, self.workers, strict=True):
            slot.link = cast(WorkerLink, worker)
        self.versions = VersionTable(plan(1))
        self.loader = Loader()
        self.exclusive = ExclusiveOperation()
        self.change = VersionRollout(
            self, self.placement, self.versions, cast(BundleLoader, self.loader), 60.0, self.exclusive
        )

    def switch_to(self, plan: VersionPlan, desired: Desired) -> None:
        self.versions.switch_to(plan)

    @property
    def busy(self) -> bool:
        try:
            with self.exclusive.acquire("this test"):
                return False
        except OperationInProgressError:
            return True

    async def until_idle(self) -> None:
        async with asyncio.timeout(30):
            while self.busy:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.005)


async def cancelled(task: asyncio.Task[ModelVersion]) -> None:
    task.cancel()
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_next_change_waits_for_the_file_of_a_cancelled_load() -> None:
    service = Service()
    task = asyncio.create_task(service.change.run("v2", desire))
    await asyncio.to_thread(service.loader.begun.wait, 60)
    await cancelled(task)
    assert service.busy
    service.loader.proceed.set()
    await service.until_idle()
    assert not any(worker.loading.is_set() for worker in service.workers)
    assert service.versions.current.version.number == 1


async def test_workers_drop_the_version_when_a_load_is_cancelled_while_one_loads() -> None:
    service = Service()
    service.loader.proceed.set()
    task = asyncio.create_task(service.change.run("v2", desire))
    first, second = service.workers
    async with asyncio.timeout(30):
        await first.loading.wait()
    await cancelled(task)
    assert service.busy
    assert first.dropped == [], "its reply to the assignment is outstanding"
    first.proceed.set()
    await service.until_idle()
    assert not second.loading.is_set()
    assert [worker.loaded_plans for worker in service.workers] == [{1}, {1}]
    assert [worker.dropped for worker in service.workers] == [[2], [2]]
    assert service.versions.current.version.number == 1
    assert service.change.loading is None


async def test_progress_names_the_worker_that_loads_and_those_that_have_passed() -> None:
    service = Service()
    first, second = service.workers
    first.worker, second.worker = "a", "b"
    second.world_name = "s0.r1"
    task = asyncio.create_task(service.change.run("v2", desire))
    async with asyncio.timeout(30):
        await asyncio.to_thread(service.loader.begun.wait, 30)
        assert service.change.progress == RolloutProgress("reading")
        service.loader.proceed.set()
        await first.loading.wait()
        assert service.change.progress == RolloutProgress("loading", "a", "s0.r0", (), 2)
        first.proceed.set()
        await second.loading.wait()
        assert service.change.progress == RolloutProgress("loading", "b", "s0.r1", ("a",), 2)
        second.proceed.set()
        while service.versions.retiring is None:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)
        assert service.change.progress == RolloutProgress("ending", passed=("a", "b"), workers=2)
        service.versions.retiring = None
        for worker in service.workers:
            worker.active_plans = {2}
        service.change.check_retired()
        await task
    assert service.change.progress is None


async def test_rollout_completes_when_its_caller_leaves_after_the_switch() -> None:
    service = Service()
    service.loader.proceed.set()
    for worker in service.workers:
        worker.proceed.set()
    task = asyncio.create_task(service.change.run("v2", desire))
    async with asyncio.timeout(30):
        while service.versions.retiring is None:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)
    await cancelled(task)
    assert service.busy
    service.versions.retiring = None
    for worker in service.workers:
        worker.active_plans = {2}
    service.change.check_retired()
    await service.until_idle()
    assert service.versions.current.version.number == 2
    assert [worker.dropped for worker in service.workers] == [[], []]


def test_version_numbers_are_unique_and_known_ones_are_bounded() -> None:
    versions = VersionTable(plan(1))
    assert versions.number_of("lost") == 2
    assert versions.number_of("other") == 3
    forgotten: list[ModelVersion] = []
    for name in [*(f"n{at}" for at in range(20)), "n18"]:
        version = ModelVersion(versions.number_of(name), name)
        moved = VersionPlan(version, (cast(StagePlan, None),))
        former = versions.current
        forgotten += versions.switch_to(moved)
        assert versions.plan(moved.key) is moved
        assert versions.plan(former.key) is former, "its requests have not ended"
        versions.retiring = None
        with pytest.raises(KeyError):
            versions.plan(former.key)
    assert len(versions._known) == 8
    assert [version.name for version in forgotten] == ["v1", *(f"n{at}" for at in range(12))]
    assert versions.number_of("n19") == 23, "it was in service recently"
    assert versions.number_of("n0") > 23


def test_version_has_the_number_of_another_leader_unless_it_is_taken() -> None:
    versions = VersionTable(plan(1))
    versions.agree(ModelVersion(5, "v5"))
    assert versions.number_of("v5") == 5
    assert versions.number_of("other") == 6
    versions.agree(ModelVersion(1, "twin"))
    assert versions.number_of("twin") == 7


async def test_load_continues_when_a_worker_is_lost_unless_the_version_may_be_the_reason() -> None:
    for lost, completes in ((1, True), (3, False)):
        service = Service()
        service.loader.proceed.set()
        first, second = service.workers
        second.proceed.set()
        first.lost = lost
        first.proceed.set()
        second.state = "ready" if completes else "broken"
        task = asyncio.create_task(service.change.run("v2", desire))
        async with asyncio.timeout(30):
            if completes:
                while service.versions.retiring is None:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.005)
                task.cancel()
            else:
                with pytest.raises(VersionFailedError, match="workers are lost while they load v2: gone"):
                    await task
