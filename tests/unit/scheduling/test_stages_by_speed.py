"""Stages for workers of different speed and memory: at the start, and later by exchanges."""

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pydantic import SecretStr

from multiworld_serving.common.wire import JoinRequest
from multiworld_serving.models.partition import partition
from multiworld_serving.server.observability.metrics import Metrics
from multiworld_serving.server.replicas.exclusive_operation import ExclusiveOperation
from multiworld_serving.server.replicas.link_types import SlotId
from multiworld_serving.server.replicas.placement import Placement
from multiworld_serving.server.replicas.rebalancing import Rebalancer, better_cut, better_exchange, stage_devices
from multiworld_serving.server.replicas.registry import WorkerRegistry
from multiworld_serving.server.replicas.worker_link import WorkerLink
from multiworld_serving.server.settings import ServeSettings
from multiworld_serving.server.versions.cut_bundle import CutBundle
from multiworld_serving.server.versions.version_table import VersionPlan
from multiworld_serving.workers.compute.device_power import free_memory_mb, measured_gflops


class Link:
    """What placement reads of a link."""

    def __init__(self, worker: str, gflops: float, slot: SlotId, host: str = "") -> None:
        self.worker, self.slot, self.world_name, self.state = worker, slot, slot.name, "ready"
        self.id = f"{slot.name}#1"
        self.request = JoinRequest(worker, "cpu", host or worker, 1, gflops=gflops)

    @property
    def stage(self) -> int | None:
        return self.slot.stage


def join(placement: Placement, worker: str, gflops: float, host: str = "") -> int | None:
    strength = placement.strength(JoinRequest(worker, "cpu", host or worker, 1, gflops=gflops))
    slot = placement.free_slot(placement.choose_stage(host or worker, strength=strength))
    slot.link = cast(WorkerLink, Link(worker, gflops, slot.id, host))
    return slot.stage


def placed(costs: tuple[float, ...], *stages: tuple[float, ...]) -> Placement:
    """Workers of these speeds in each stage. They are named a0, a1, … in the first stage, b0, … in the next."""
    placement = Placement(len(stages), len(stages[0]), costs=costs)
    for stage, speeds in enumerate(stages):
        for index, (speed, slot) in enumerate(zip(speeds, placement.of_stage(stage), strict=True)):
            slot.link = cast(WorkerLink, Link(f"{'abcd'[stage]}{index}", speed, slot.id))
    return placement


def exchange(placement: Placement) -> tuple[str, str] | None:
    found = better_exchange(placement)
    return found and (found[0].worker, found[1].worker)


class Chain:
    """Stands for a `CutBundle`: 64 equal blocks, cut anywhere."""

    def __init__(self, *sizes: int, size_bytes: int = 1_000_000) -> None:
        self.sizes, self._size_bytes = sizes, size_bytes

    def for_speeds(self, speeds: list[float]) -> "Chain":
        ranges = partition([1.0] * sum(self.sizes), len(speeds), [0.0] * (sum(self.sizes) - 1), speeds=speeds)
        return Chain(*(end - first for first, end in ranges), size_bytes=self._size_bytes)

    def slowest_s(self, speeds: list[float]) -> float:
        return max(size / speed for size, speed in zip(self.sizes, speeds, strict=True))

    @property
    def weights_bytes(self) -> tuple[int, ...]:
        return tuple(size * self._size_bytes for size in self.sizes)


def cut(placement: Placement, chain: Chain) -> tuple[int, ...] | None:
    devices = stage_devices(placement)
    found = better_cut(cast(CutBundle, chain), devices) if devices else None
    return None if found is None else cast(Chain, found).sizes


@pytest.mark.parametrize(("third", "stage"), [(300.0, 1), (100.0, 0), (40.0, 0)])
def test_a_strong_worker_gets_the_stage_with_more_work_if_both_need_one(third: float, stage: int) -> None:
    placement = Placement(2, 2, costs=(1.0, 2.0))
    assert [join(placement, "a", 100.0), join(placement, "b", 100.0)] == [0, 1]
    assert join(placement, "c", third) == stage


def test_a_weak_worker_gets_the_stage_with_less_work() -> None:
    placement = Placement(2, 2, costs=(2.0, 1.0))
    assert [join(placement, name, 100.0) for name in "ab"] == [0, 1]
    assert join(placement, "c", 20.0) == 1
    assert join(placement, "d", 500.0) == 0


def test_coverage_and_redundancy_come_before_speed() -> None:
    placement = Placement(2, 2, costs=(1.0, 9.0))
    assert [join(placement, "a", 1.0), join(placement, "b", 1.0), join(placement, "c", 100.0)] == [0, 1, 1]
    assert join(placement, "d", 100.0) == 0, "the other stage has two already"


def test_speeds_of_one_machine_count_as_the_highest() -> None:
    """Workers that start together disturb each other's measurement."""
    placement = Placement(2, 2, costs=(1.0, 2.0))
    for name, gflops in (("a", 100.0), ("b", 30.0), ("c", 250.0)):
        assert placement.strength(JoinRequest(name, "cpu", "here", 1, gflops=gflops)) <= 0 or name == "c"
        join(placement, name, gflops, "here")
    assert set(placement.speeds().values()) == {250.0}
    assert better_exchange(placement) is None


def test_a_stage_that_does_not_fit_into_memory_is_not_chosen() -> None:
    placement = Placement(2, 2)
    assert placement.choose_stage("h", too_large=[0]) == 1
    assert placement.choose_stage("h", too_large=[0, 1]) == 0, "no stage fits: the worker reports why it fails"


def test_the_registry_passes_memory_and_work_on_to_placement(caplog: pytest.LogCaptureFixture) -> None:
    stages = tuple(
        SimpleNamespace(spec=SimpleNamespace(index=index), weights=SimpleNamespace(size=size), cost_s=1.0 + index)
        for index, size in enumerate([300_000_000, 100_000_000])
    )
    settings, none = ServeSettings(token=SecretStr("a-secret-of-this-test"), join_port=0, replicas=2), cast(Any, None)
    registry = WorkerRegistry(cast(VersionPlan, SimpleNamespace(stages=stages)), settings, Metrics(), none, none, none)
    request, nowhere = JoinRequest("w", "cpu", "here", 1, memory_mb=500), frozenset[int]()
    assert registry._choose_slot(request, nowhere, nowhere).stage == 1, "the first needs 600 MB while it is loaded"
    assert "worker=w has 500 MB of memory, too little for the stages 0" in caplog.text
    assert registry.placement.costs == (1.0, 2.0)
    unknown = JoinRequest("w", "cpu", "here", 1)
    assert registry._choose_slot(unknown, nowhere, nowhere).stage == 0


@pytest.mark.parametrize(
    ("stages", "before", "after"),
    [
        (((100.0, 100.0), (100.0,)), (32, 32), (43, 21)),  # a worker of the second stage is gone for good
        (((100.0, 100.0), (100.0, 100.0)), (43, 21), (32, 32)),  # it is back
        (((100.0, 70.0), (60.0, 100.0)), (32, 32), None),  # measurements of equal machines differ
        (((100.0, 100.0), (100.0, 10.0)), (32, 32), (41, 23)),
        (((0.0, 0.0), (0.0,)), (32, 32), (43, 21)),  # not measured: as many as there are
        (((100.0,), (100.0,)), (33, 31), None),  # not worth the change
    ],
)
def test_the_model_is_cut_for_the_workers_that_there_are(
    stages: tuple[tuple[float, ...], ...], before: tuple[int, ...], after: tuple[int, ...] | None
) -> None:
    placement = placed((1.0, 1.0), *((*each, *[1.0] * (2 - len(each))) for each in stages))
    for stage, speeds in enumerate(stages):
        for slot in placement.of_stage(stage)[len(speeds) :]:
            slot.link = None
    assert cut(placement, Chain(*before)) == after


def test_the_model_is_not_cut_if_a_stage_is_missing_or_would_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    placement = placed((1.0, 1.0), (100.0, 100.0), (100.0, 10.0))
    link = placement.of_stage(0)[1].link
    assert link is not None
    link.request = replace(link.request, memory_mb=113)
    assert cut(placement, Chain(32, 32)) is None
    assert "a larger one needs 114 MB, and a worker has 113" in caplog.text
    link.request = replace(link.request, memory_mb=114)
    assert cut(placement, Chain(32, 32)) == (41, 23)
    for slot in placement.of_stage(1):
        slot.link = None
    assert cut(placement, Chain(32, 32)) is None


async def test_cuts_are_tried_again_after_an_error_when_something_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    plan, tried = SimpleNamespace(cut=Chain(32, 32), number=1), asyncio.Queue[CutBundle]()

    async def recut(cut: CutBundle) -> None:
        tried.put_nowait(cut)
        if plan.number == 1:
            raise OSError("a file with weights has become shorter")

    registry = cast(WorkerRegistry, SimpleNamespace(placement=placed((1.0, 1.0), (100.0,), (20.0,)), plan=plan))
    rebalancer = Rebalancer(registry, recut, ExclusiveOperation(), after_s=0.01, timeout_s=1.0)
    rebalancer.start()
    async with asyncio.timeout(30):
        assert cast(Chain, await tried.get()).sizes == (54, 10)
        plan.number = 2
        await tried.get()
    rebalancer.stop()
    assert "a file with weights has become shorter" in caplog.text


def test_speed_and_memory_of_this_machine_are_known() -> None:
    device = torch.device("cpu")
    one, two = measured_gflops(device, 1), measured_gflops(device, 64)
    assert two > one > 0
    assert free_memory_mb(device) > 0


def test_an_exchange_moves_the_fast_worker_to_the_slowest_stage() -> None:
    assert exchange(placed((1.0, 1.0), (100.0, 100.0), (10.0, 10.0))) == ("b0", "a0")
    assert exchange(placed((1.0, 4.0), (100.0, 100.0), (100.0, 20.0))) == ("b1", "a0")
    assert exchange(placed((1.0, 1.0, 1.0), (100.0, 100.0), (10.0, 10.0), (10.0, 10.0))) == ("b0", "a0")


@pytest.mark.parametrize(
    "placement",
    [
        placed((1.0, 1.0), (100.0, 100.0), (60.0, 60.0)),  # not clearly slower
        placed((1.0, 1.0), (100.0, 10.0), (100.0, 10.0)),
        placed((5.0, 1.0), (100.0, 100.0), (30.0, 30.0)),  # the faster workers have the stage with more work
        placed((1.0, 1.0), (100.0,), (10.0,)),  # a stage would be without a worker for a while
        placed((1.0, 1.0), (100.0, 100.0), (10.0, 0.0)),  # not measured
        placed((), (100.0, 100.0), (10.0, 10.0)),
    ],
)
def test_nothing_is_exchanged_without_a_clear_gain(placement: Placement) -> None:
    assert better_exchange(placement) is None


def rates(placement: Placement) -> list[float]:
    return [
        sum(slot.link.request.gflops for slot in placement.of_stage(stage) if slot.link) / cost
        for stage, cost in enumerate(placement.costs)
    ]


@pytest.mark.parametrize("seed", range(200))
def test_exchanges_and_cuts_end_and_never_make_the_slowest_stage_slower(seed: int) -> None:
    chance = random.Random(seed)
    stages, replicas = chance.randint(2, 5), chance.randint(2, 6)
    chain = Chain(*([120 // stages] * stages))
    placement = Placement(stages, replicas, costs=tuple(map(float, chain.sizes)))
    for number in range(stages * replicas):
        join(placement, f"w{number}", chance.choice([10.0, 30.0, 100.0, 300.0]))
    for _ in range(stages * replicas * 10):
        before, clear = min(rates(placement)), [device.speed for device in stage_devices(placement)]
        if (found := better_exchange(placement)) is not None:
            slots = [placement.slot_of(link) for link in found]
            assert slots[0] is not None
            assert slots[1] is not None
            slots[0].link, slots[1].link = found[1], found[0]
            found[0].slot, found[1].slot = slots[1].id, slots[0].id
            assert min(rates(placement)) >= before
        elif (sizes := cut(placement, chain)) is not None:
            assert Chain(*sizes).slowest_s(clear) * 1.1 <= chain.slowest_s(clear)
            chain, placement.costs = Chain(*sizes), tuple(map(float, sizes))
        else:
            break
    else:
        pytest.fail(f"seed {seed}: the changes do not end")
    assert all(slot.link for slot in placement.all)
