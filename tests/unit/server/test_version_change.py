"""Loading a version and restarting workers, with workers that are not connected: what is performed, and what stays after a failure."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import SecretStr

from multiworld import Cause
from multiworld_serving.common.service.administration import (
    Desired,
    OperationInProgressError,
    RestartFailedError,
    VersionFailedError,
)
from multiworld_serving.common.service.predictor import ModelVersion
from multiworld_serving.common.service.snapshots import RolloutProgress
from multiworld_serving.common.settings.serve import ServeSettings
from multiworld_serving.common.wire.join import JoinRequest
from multiworld_serving.server.leader.metrics import LeaderMetrics
from multiworld_serving.server.leader.operations import Operations
from multiworld_serving.server.leader.pipeline.driver import SchedulerDriver
from multiworld_serving.server.leader.replicas import reconcile
from multiworld_serving.server.leader.replicas.registry import WorkerRegistry
from multiworld_serving.server.leader.replicas.worker import Ending, LinkEndedError, SelfTestError, Worker
from multiworld_serving.server.leader.replicas.worker_link import WorkerLink
from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from multiworld_serving.server.leader.serving import Serving
from multiworld_serving.server.leader.versions.model_source import ModelSource
from multiworld_serving.server.leader.versions.stage_plan import BundlePlan
from multiworld_serving.server.leader.versions.version_table import VersionPlan, VersionTable
from tests.waiting import until

WAIT_S = 30.0


class Link:
    """A link without a world. Its worker loads a version when it is told to proceed, and raises `failure` first."""

    def __init__(self, worker: Worker, on_state: Callable[[Any], None]) -> None:
        self.worker = worker
        self.on_state = on_state
        self.dropped: list[int] = []
        self.loading, self.proceed = asyncio.Event(), asyncio.Event()
        self.failure: list[Exception] = []
        self.restarts = 0

    async def load(self, plans: object) -> None:
        self.loading.set()
        await self.proceed.wait()
        if self.failure:
            raise self.failure.pop()
        self.worker.loaded.add(2)

    def unload(self, version: int) -> None:
        self.worker.loaded.discard(version)
        self.dropped.append(version)

    def request_restart(self) -> None:
        self.restarts += 1

    def end(self, cause: str = Cause.LEFT) -> None:
        self.worker.state, self.worker.ending = "broken", Ending(cause, "of this test")
        self.on_state(self)

    def close(self) -> None:
        self.end()


class Loader:
    """Builds version 2 when it is told to proceed."""

    def __init__(self) -> None:
        self.begun, self.proceed = threading.Event(), threading.Event()

    def load(self, weights: str | None, versions: VersionTable) -> VersionPlan:
        self.begun.set()
        self.proceed.wait()
        return plan(2)


def plan(number: int) -> VersionPlan:
    spec = SimpleNamespace(index=0, blocks=())
    return VersionPlan(ModelVersion(number, f"v{number}"), (cast(BundlePlan, SimpleNamespace(spec=spec)),))


class Service:
    """Operations with two workers of one stage, a and b, on hosts of their own."""

    def __init__(self) -> None:
        settings = ServeSettings(token=SecretStr("a-secret-of-this-test"), join_port=0, stages=1, replicas=2)
        self.versions, metrics = VersionTable(plan(1)), LeaderMetrics()
        self.driver = SchedulerDriver("m", SchedulerConfig(1), metrics, self.versions, self.after_event)
        none = cast(Any, None)
        self.registry = WorkerRegistry(self.versions, settings, metrics, none, self.driver, lambda: None)
        self.loader, self.switched = Loader(), list[Desired]()
        loader = cast(ModelSource, self.loader)
        self.operations = Operations(self.registry, self.versions, loader, WAIT_S, self.switched.append)
        self.links = [self.join("a", 1), self.join("b", 1)]

    def after_event(self) -> None:
        self.registry.after_event()

    def join(self, name: str, pid: int = 2) -> Link:
        registry = self.registry
        slot = registry.placement.free_slot(0)
        generation = registry.placement.next_generation(slot.id.name)
        request = JoinRequest(name, "cpu", f"host-{name}", pid)
        worker = Worker(request, slot.id, generation, loaded={self.versions.current.number})
        registry.placement.take(slot, worker)
        link = Link(worker, registry._on_state)
        registry._links[worker.id] = cast(WorkerLink, link)
        worker.state, worker.ready_at_s = "ready", asyncio.get_running_loop().time()
        registry.reconcile()
        return link

    def load(self) -> asyncio.Task[ModelVersion]:
        return asyncio.create_task(self.operations.load_version("v2", lambda plan: Desired(1, plan.version)))

    @property
    def busy(self) -> bool:
        try:
            with self.operations.exclusive("this test"):
                return False
        except OperationInProgressError:
            return True

    async def until_idle(self) -> None:
        await until(lambda: not self.busy)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    made = Service()
    yield made
    made.loader.proceed.set()
    made.driver.close()
    made.operations.close()
    made.registry.stop()


async def cancelled(task: asyncio.Task[ModelVersion]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_next_version_is_read_after_the_file_of_a_cancelled_load(service: Service) -> None:
    task = service.load()
    await asyncio.to_thread(service.loader.begun.wait, WAIT_S)
    assert service.operations.progress == RolloutProgress("reading")
    await cancelled(task)
    await service.until_idle()
    service.loader.begun.clear()
    task = service.load()
    await asyncio.sleep(0)
    assert not service.loader.begun.is_set(), "it would take memory for two versions"
    service.loader.proceed.set()
    await until(service.links[0].loading.is_set)
    await cancelled(task)


async def test_workers_drop_the_version_when_a_load_is_cancelled_while_one_loads(service: Service) -> None:
    service.loader.proceed.set()
    task = service.load()
    first, second = service.links
    await first.loading.wait()
    await cancelled(task)
    assert service.busy
    assert first.dropped == [], "its reply to the assignment is outstanding"
    first.proceed.set()
    await service.until_idle()
    assert not second.loading.is_set()
    assert [link.worker.loaded for link in service.links] == [{1}, {1}]
    assert first.dropped == [2]
    assert (service.versions.current.number, service.switched) == (1, [])


async def test_progress_names_the_worker_that_loads_and_those_that_have_passed(service: Service) -> None:
    first, second = service.links
    service.loader.proceed.set()
    task = service.load()
    await first.loading.wait()
    assert service.operations.progress == RolloutProgress("loading", "a", "s0.r0", (), 2)
    assert not second.loading.is_set(), "the first worker of a stage shows that the version can be loaded"
    first.proceed.set()
    await second.loading.wait()
    assert service.operations.progress == RolloutProgress("loading", "b", "s0.r1", ("a",), 2)
    second.proceed.set()
    assert await task == ModelVersion(2, "v2")
    assert [desired.version.number for desired in service.switched] == [2]
    assert service.operations.progress is None
    assert [(link.worker.loaded, link.dropped) for link in service.links] == [({2}, [1])] * 2


async def test_rollout_completes_when_a_worker_is_lost_while_it_loads(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "_RETRY_S", 0.01)
    first, second = service.links
    first.failure.append(LinkEndedError("gone"))
    service.loader.proceed.set()
    task = service.load()
    await first.loading.wait()
    first.end(Cause.EXIT)
    first.proceed.set()
    await second.loading.wait()
    again = service.join("a")
    second.proceed.set()
    await again.loading.wait()
    again.proceed.set()
    assert await task == ModelVersion(2, "v2")


@pytest.mark.parametrize(
    ("failing", "failures", "says"),
    [
        (2, [SelfTestError("the output differs")], "version v2 failed: the output differs"),
        (2, [LinkEndedError("gone")] * 3, "3 workers in a row were lost while they loaded it"),
    ],
)
async def test_version_fails_when_workers_compute_something_else_or_are_lost(
    service: Service, monkeypatch: pytest.MonkeyPatch, failing: int, failures: list[Exception], says: str
) -> None:
    monkeypatch.setattr(reconcile, "_RETRY_S", 0.01)
    for link in service.links:
        link.failure += failures if link in service.links[-failing:] else []
        link.proceed.set()
    service.loader.proceed.set()
    with pytest.raises(VersionFailedError, match=says):
        await service.load()
    assert service.versions.current.number == 1


async def test_operation_that_a_lost_leader_has_begun_is_awaited_and_not_performed_again(service: Service) -> None:
    async def inform() -> None:
        pass

    serving = Serving(
        *(service.registry, service.versions, cast(ModelSource, service.loader), WAIT_S, service.driver.requests),
        *(inform, lambda: None),
    )
    wanted = Desired(3, ModelVersion(2, "v2"), "v2")
    serving.follow(wanted)
    asked = asyncio.create_task(serving.load_version("v2", 3))
    service.loader.proceed.set()
    assert await asked == wanted.version
    assert serving.served == wanted
    serving.close()


async def test_workers_are_restarted_one_after_another_each_when_all_others_are_ready(service: Service) -> None:
    first, second = service.links

    async def restart() -> list[str]:
        return [f"{step.worker} {step.state}" async for step in service.operations.restart_workers()]

    task = asyncio.create_task(restart())
    await until(lambda: first.restarts == 1)
    with pytest.raises(OperationInProgressError, match="a rolling restart is in progress"):
        await service.load()
    first.end()
    await asyncio.sleep(0.01)
    assert second.restarts == 0
    service.join("a")
    await until(lambda: second.restarts == 1)
    second.end()
    service.join("b")
    assert await task == ["a restarting", "a restarted", "b restarting", "b restarted"]


async def restart_while_the_second_is_suspended(service: Service, successor: str) -> AsyncIterator[str]:
    """The steps of a rolling restart. When the first worker leaves, the link of the second one breaks and this one joins instead."""
    first, second = service.links
    async for step in service.operations.restart_workers():
        yield f"{step.worker} {step.state}"
        if (step.worker, step.state) == ("a", "restarting"):
            second.end(Cause.HANG)
            first.end()
            service.join("a")
            second = service.join(successor, 1)
        elif step.state == "restarting":
            assert second.restarts == 1
            second.end()
            service.join("b")


async def test_suspended_process_is_restarted_when_it_joins_again_during_a_rolling_restart(service: Service) -> None:
    steps = [step async for step in restart_while_the_second_is_suspended(service, "b")]
    assert steps == ["a restarting", "a restarted", "b restarting", "b restarted"]


async def test_restart_names_a_worker_that_may_still_run_and_does_not_join(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiworld_serving.server.leader.operations._REJOIN_S", 0.05)
    with pytest.raises(RestartFailedError, match=r"not restarted: b$"):
        [step async for step in restart_while_the_second_is_suspended(service, "another")]
    assert not service.busy


async def test_restart_fails_when_a_worker_does_not_leave(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiworld_serving.server.leader.operations._LEAVE_S", 0.05)
    with pytest.raises(RestartFailedError, match=r"a has not left for 0\.05 s; not restarted: a, b"):
        async for _ in service.operations.restart_workers():
            pass
    assert service.links[1].restarts == 0
    assert not service.busy


def test_version_numbers_are_unique_and_known_ones_are_bounded() -> None:
    versions = VersionTable(plan(1))
    assert versions.number_of("lost") == 2
    assert versions.number_of("other") == 3
    for name in [*(f"n{at}" for at in range(20)), "n18"]:
        version = ModelVersion(versions.number_of(name), name)
        moved = VersionPlan(version, (cast(BundlePlan, None),))
        former = versions.current
        versions.switch_to(moved)
        assert versions.plan(moved.key) is moved
        assert versions.plan(former.key) is former, "its requests have not ended"
        versions.retiring = None
        with pytest.raises(KeyError):
            versions.plan(former.key)
    assert list(versions._known) == [*(f"n{at}" for at in range(12, 18)), "n19", "n18"]
    assert versions.number_of("n19") == 23, "it was in service recently"
    assert versions.number_of("n0") > 23


def test_version_has_the_number_of_another_leader_unless_it_is_taken() -> None:
    versions = VersionTable(plan(1))
    versions.agree(ModelVersion(5, "v5"))
    assert versions.number_of("v5") == 5
    assert versions.number_of("other") == 6
    versions.agree(ModelVersion(1, "twin"))
    assert versions.number_of("twin") == 7
