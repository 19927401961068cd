"""Placement of workers on stages, and promotion of spares."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from multiworld import Cause
from multiworld_serving.common.wire.join import JoinRequest
from multiworld_serving.server.observability.leader_metrics import LeaderMetrics
from multiworld_serving.server.replicas.link_types import SlotId
from multiworld_serving.server.replicas.placement import Placement
from multiworld_serving.server.replicas.registry import WorkerRegistry
from multiworld_serving.server.replicas.worker_link import WorkerLink
from multiworld_serving.server.settings import ServeSettings
from multiworld_serving.server.snapshots import ReplicaState
from multiworld_serving.server.versions.version_table import VersionPlan


class FakeLink:
    """The attributes that `Placement` uses."""

    def __init__(self, worker: str, slot: SlotId, state: ReplicaState = "ready", host: str = "h") -> None:
        self.worker = worker
        self.request = JoinRequest(worker, "cpu", host, 1)
        self.state = state
        self.slot = slot
        self.world_name = slot.name
        self.id = f"{slot.name}#1"
        self.stage = slot.stage
        self.cause, self.detail, self.leader_unresponsive = Cause.EXIT, "", False
        self.silent_s: float | None = None
        self.ready_at_s: float | None = None
        self.batches_done = 0
        self.obeys = ""


def join(slots: Placement, worker: str, host: str = "h") -> str:
    slot = slots.free_slot(slots.choose_stage(host))
    slot.link = cast(WorkerLink, FakeLink(worker, slot.id, host=host))
    return slot.id.name


def fail(slots: Placement, name: str) -> None:
    slot = next(slot for slot in (*slots.all, *slots.spares) if slot.id.name == name)
    assert slot.link is not None
    slot.link.state = "broken"


def test_workers_are_spread_evenly_over_the_stages() -> None:
    slots = Placement(2, 2)
    assert [join(slots, name) for name in "abcd"] == ["s0.r0", "s1.r0", "s0.r1", "s1.r1"]


def test_replicas_of_a_stage_are_spread_over_hosts() -> None:
    slots = Placement(2, 2)
    places = {(host, join(slots, f"{host}{number}", host)[:2]) for number in range(2) for host in ("left", "right")}
    assert places == {(host, stage) for host in ("left", "right") for stage in ("s0", "s1")}


def test_new_worker_gets_the_slot_of_the_broken_one() -> None:
    slots = Placement(2, 2)
    for name in "abcd":
        join(slots, name)
    fail(slots, "s1.r0")
    assert join(slots, "e") == "s1.r0"


def leave(slots: Placement, name: str) -> None:
    slot = next(slot for slot in slots.all if slot.id.name == name)
    fail(slots, name)
    slots.remove_extra_slot(slot)


def names(slots: Placement) -> list[str]:
    return [slot.id.name for slot in slots.all]


def test_stage_returns_to_its_size_when_extra_replicas_have_left() -> None:
    slots = Placement(2, 2)
    for name in "abcdef":
        join(slots, name)
    assert names(slots) == ["s0.r0", "s0.r1", "s0.r2", "s1.r0", "s1.r1", "s1.r2"]
    leave(slots, "s0.r0")  # any of them
    leave(slots, "s1.r2")
    assert names(slots) == ["s0.r1", "s0.r2", "s1.r0", "s1.r1"]
    assert not any(slot.free for slot in slots.all)
    assert [join(slots, name) for name in "gh"] == ["s0.r0", "s1.r2"]


def test_slot_stays_when_its_worker_failed_or_the_stage_has_no_extra_replicas() -> None:
    slots = Placement(1, 2)
    for name in "abc":
        join(slots, name)
    fail(slots, "s0.r2")  # it is expected to rejoin
    assert names(slots) == ["s0.r0", "s0.r1", "s0.r2"]
    leave(slots, "s0.r2")
    leave(slots, "s0.r1")
    assert names(slots) == ["s0.r0", "s0.r1"]


def test_excess_workers_become_spares_first_and_then_extra_replicas() -> None:
    slots = Placement(2, 1, spares_wanted=2)
    assert [join(slots, name) for name in "abcdefg"] == [
        "s0.r0",
        "s1.r0",
        "spare0",
        "spare1",
        "s0.r1",
        "s1.r1",
        "s0.r2",
    ]


def test_repeated_join_request_is_recognized_while_its_link_lives() -> None:
    slots = Placement(1, 2, spares_wanted=1)
    for name in "abc":
        join(slots, name)
    assert slots.live_link_of("a") is slots.all[0].link
    assert slots.live_link_of("c") is slots.spares[0].link
    assert slots.live_link_of("d") is None
    fail(slots, "s0.r0")
    assert slots.live_link_of("a") is None


def test_spare_takes_the_empty_slot_and_its_name_is_reserved_while_its_world_lives() -> None:
    slots = Placement(2, 2, spares_wanted=1)
    for name in "abcde":
        join(slots, name)
    assert list(slots.promote_spares()) == []
    fail(slots, "s1.r1")
    ((slot, link),) = slots.promote_spares()
    assert (slot.id.name, link.worker, link.slot, slots.spares) == ("s1.r1", "e", slot.id, [])
    assert join(slots, "d") == "spare1", "the world of spare0 serves as s1.r1"
    fail(slots, "s1.r1")
    assert [link.worker for _, link in slots.promote_spares()] == ["d"]
    assert join(slots, "f") == "spare0"


def test_spare_goes_to_the_stage_with_the_fewest_replicas() -> None:
    slots = Placement(2, 2, spares_wanted=1)
    for name in "abcde":
        join(slots, name)
    for name in ("s0.r0", "s1.r0", "s1.r1"):
        fail(slots, name)
    ((slot, _),) = slots.promote_spares()
    assert slot.stage == 1


def test_empty_stage_gets_a_replica_of_the_largest_stage() -> None:
    slots = Placement(3, 2)
    for name in "abcdef":
        join(slots, name)
    assert (list(slots.stages_without_worker()), slots.reassignment_candidate() is not None) == ([], True)
    fail(slots, "s0.r0")
    fail(slots, "s0.r1")
    fail(slots, "s1.r0")
    reassignment_candidate = slots.reassignment_candidate()
    assert list(slots.stages_without_worker()) == [0]
    assert reassignment_candidate is not None
    assert reassignment_candidate.slot.stage == 2
    fail(slots, "s2.r0")
    assert slots.reassignment_candidate() is None, "no stage has more than one replica"


def test_placement_is_fully_replicated_when_every_stage_has_its_replicas_and_no_worker_is_joining() -> None:
    slots = Placement(2, 2)
    for name in "abcd":
        assert not slots.fully_replicated
        join(slots, name)
    assert slots.fully_replicated
    join(slots, "e")
    assert slots.fully_replicated, "with an extra replica of stage 0"
    (further,) = [slot for slot in slots.all if slot.index == 2]
    assert further.link is not None
    further.link.state = "loading"
    assert not slots.fully_replicated
    fail(slots, further.id.name)
    assert slots.fully_replicated, "lost extra replicas are not missing"
    fail(slots, "s1.r0")
    assert not slots.fully_replicated
    join(slots, "f")
    assert slots.fully_replicated


async def test_extra_replica_that_crashed_is_removed_when_no_worker_takes_its_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("multiworld_serving.server.replicas.registry._SLOT_RETENTION_S", 0.01, raising=False)
    settings = ServeSettings(token=SecretStr("a-secret-of-this-test"), join_port=0, replicas=1)
    told = asyncio.Event()
    plan = cast(VersionPlan, SimpleNamespace(stages=(None,)))
    around = cast(Any, None)
    registry = WorkerRegistry(plan, settings, LeaderMetrics(), around, around, told.set)
    slots = registry.placement
    for worker in ("kept", "further"):
        join(slots, worker)
    fail(slots, "s0.r1")
    lost = slots.all[1].link
    assert lost is not None
    told.clear()
    registry.on_link_state(lost)
    assert names(slots) == ["s0.r0", "s0.r1"], "it is expected to rejoin"
    told.clear()
    async with asyncio.timeout(30):
        await told.wait()
    assert names(slots) == ["s0.r0"]
    registry.stop()


async def test_slot_of_a_crashed_worker_stays_when_another_worker_has_taken_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiworld_serving.server.replicas.registry._SLOT_RETENTION_S", 0.0, raising=False)
    settings = ServeSettings(token=SecretStr("a-secret-of-this-test"), join_port=0, replicas=1)
    plan = cast(VersionPlan, SimpleNamespace(stages=(None,)))
    around = cast(Any, None)
    registry = WorkerRegistry(plan, settings, LeaderMetrics(), around, around, lambda: None)
    slots = registry.placement
    for worker in ("kept", "further"):
        join(slots, worker)
    fail(slots, "s0.r1")
    lost = slots.all[1].link
    assert lost is not None
    registry.on_link_state(lost)
    join(slots, "successor")
    await asyncio.sleep(0.01)  # the timer expired before this point
    assert names(slots) == ["s0.r0", "s0.r1"]
    registry.stop()


def returns(slots: Placement, worker: str, *held: int) -> str:
    slot = slots.slot_holding(held)
    slot.link = cast(WorkerLink, FakeLink(worker, slot.id))
    return slot.id.name


@given(st.integers(1, 4), st.integers(1, 3), st.permutations(range(14)), st.permutations(range(14)))
def test_restarted_leader_has_the_layout_of_the_other_one_when_all_workers_have_joined(
    num_stages: int, replicas: int, first: list[int], second: list[int]
) -> None:
    count = num_stages * replicas + 2
    one, other = (Placement(num_stages, replicas, spares_wanted=1) for _ in range(2))
    places = {worker: join(one, str(worker)) for worker in first if worker < count}
    for worker in second:
        if worker < count and num_stages > 1:
            stage = places[worker].split(".")[0]
            held = range(num_stages) if stage == "spare0" else [int(stage[1:])]
            assert returns(other, str(worker), *held).split(".")[0] == stage


def test_worker_that_holds_a_stage_gets_it_if_it_has_a_free_slot_and_every_stage_has_a_worker() -> None:
    slots = Placement(3, 2)
    for name in "abc":
        join(slots, name)
    assert [slots.choose_stage(held=[stage]) for stage in range(3)] == [0, 1, 2]
    fail(slots, "s1.r0")
    assert slots.choose_stage(held=[0]) == 1, "which has no worker"


def test_worker_that_obeys_another_leader_is_not_reassigned() -> None:
    slots = Placement(2, 2)
    for name in "abcd":
        join(slots, name)
    fail(slots, "s1.r0")
    fail(slots, "s1.r1")
    first, second = (slot.link for slot in slots.of_stage(0))
    assert first is not None
    assert second is not None
    first.obeys = "leader-0"
    assert slots.reassignment_candidate() is second
    second.obeys = "leader-0"
    assert slots.reassignment_candidate() is None


def test_further_workers_join_the_stage_with_the_most_load() -> None:
    slots = Placement(2, 2)
    for name in "abcd":
        join(slots, name)
    slots.wanted = (1.0, 3.0)
    assert [join(slots, name)[:2] for name in "efgh"] == ["s1", "s1", "s1", "s1"]
    assert [join(slots, name)[:2] for name in "ijkl"].count("s0") == 1


def test_stage_that_does_not_fit_into_memory_is_not_chosen(caplog: pytest.LogCaptureFixture) -> None:
    stages = tuple(
        SimpleNamespace(spec=SimpleNamespace(index=index), weights=SimpleNamespace(size=size))
        for index, size in enumerate([300_000_000, 100_000_000])
    )
    settings, none = ServeSettings(token=SecretStr("a-secret-of-this-test"), join_port=0, replicas=2), cast(Any, None)
    registry = WorkerRegistry(
        cast(VersionPlan, SimpleNamespace(stages=stages)), settings, LeaderMetrics(), none, none, none
    )

    def stage(memory_mb: int) -> int | None:
        request = JoinRequest("w", "cpu", "here", 1, memory_mb=memory_mb)
        return registry._choose_slot(request, frozenset()).stage

    assert stage(500) == 1, "the first needs 600 MB while it is loaded"
    assert "worker=w has 500 MB of memory, too little for the stages 0" in caplog.text
    assert stage(0) == 0, "not known"
    assert stage(100) == 0, "no stage fits: the worker reports why it fails"
