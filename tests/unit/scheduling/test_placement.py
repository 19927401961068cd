"""Placement of workers on stages. What happens to them afterwards: test_reconcile.py."""

from hypothesis import given
from hypothesis import strategies as st

from multiworld import Cause
from multiworld_serving.common.wire.join import JoinRequest
from multiworld_serving.server.leader.replicas.placement import Placement, Slot
from multiworld_serving.server.leader.replicas.reconcile import Goal, Promote, RemoveSlot, Step, WorkerStep, reconcile
from multiworld_serving.server.leader.replicas.worker import Ending, SlotId, Worker


def fill(slots: Placement, slot: Slot, worker: str, host: str = "h", gpu: str = "") -> str:
    request = JoinRequest(worker, "cpu", host, 1, gpu=gpu)
    slots.take(slot, Worker(request, slot.id, 1, state="ready", since_s=0.0, loaded={1}))
    return slot.id.name


def join(slots: Placement, worker: str, host: str = "h", gpu: str = "") -> str:
    places = JoinRequest(worker, "cpu", host, 1, gpu=gpu).places
    return fill(slots, slots.free_slot(slots.choose_stage(places)), worker, host, gpu)


def placed(workers: str, num_stages: int = 2, replicas: int = 2, spares: int = 0) -> Placement:
    """A placement that workers with these names of one letter have joined."""
    slots = Placement([replicas] * num_stages, spares)
    for worker in workers:
        join(slots, worker)
    return slots


def slot_named(slots: Placement, name: str) -> Slot:
    return next(slot for slot in slots.slots if slot.id.name == name)


def fail(slots: Placement, name: str, cause: str = Cause.EXIT) -> None:
    worker = slot_named(slots, name).worker
    assert worker is not None
    worker.state, worker.ending = "broken", Ending(cause, "")
    slots.lose(worker)


def others(slots: Placement, now_s: float = 0.0) -> list[Step]:
    """The steps that move workers or remove slots."""
    steps = reconcile(Goal((1,), moved_s=-100.0), slots, now_s).now
    return [step for step in steps if not isinstance(step, WorkerStep) or step.kind == "move"]


def settle(slots: Placement, now_s: float = 0.0) -> list[str]:
    """Remove slots and promote spares until nothing is left to do. Returns the names of promoted workers."""
    promoted = []
    while steps := others(slots, now_s):
        for step in steps:
            if isinstance(step, RemoveSlot):
                slots.remove(step.slot)
            elif isinstance(step, Promote) and step.spare.worker is not None:
                slots.remove(step.spare)
                slots.take(step.slot, step.spare.worker)
                promoted.append(step.spare.worker.name)
    return promoted


def test_replicas_of_a_stage_are_spread_over_hosts() -> None:
    slots = Placement([2, 2])
    places = {(host, join(slots, f"{host}{number}", host)[:2]) for number in range(2) for host in ("left", "right")}
    assert places == {(host, stage) for host in ("left", "right") for stage in ("s0", "s1")}


def test_replicas_of_a_stage_are_spread_over_the_gpus_of_a_host() -> None:
    slots = Placement((2, 2))
    places = {(gpu, join(slots, f"{gpu}{number}", gpu=gpu)[:2]) for gpu in ("left", "right") for number in range(2)}
    assert places == {(gpu, stage) for gpu in ("left", "right") for stage in ("s0", "s1")}


def test_new_worker_gets_the_slot_of_the_broken_one() -> None:
    slots = placed("abcd")
    former = slot_named(slots, "s1.r0").worker
    assert former is not None
    fail(slots, "s1.r0")
    assert join(slots, "e") == "s1.r0"
    assert slots.slot_of(former) is None, "another worker has taken it"


def leave(slots: Placement, name: str) -> None:
    fail(slots, name, Cause.LEFT)
    settle(slots)


def names(slots: Placement) -> list[str]:
    return [slot.id.name for stage in range(slots.num_stages) for slot in slots.of_stage(stage)]


def test_stage_returns_to_its_size_when_extra_replicas_have_left() -> None:
    slots = placed("abcdef")
    assert names(slots) == ["s0.r0", "s0.r1", "s0.r2", "s1.r0", "s1.r1", "s1.r2"]
    leave(slots, "s0.r0")  # any of them
    leave(slots, "s1.r2")
    assert names(slots) == ["s0.r1", "s0.r2", "s1.r0", "s1.r1"]
    assert [join(slots, name) for name in "gh"] == ["s0.r0", "s1.r2"]


def test_slot_of_a_failed_extra_replica_is_kept_for_a_successor_for_a_while() -> None:
    slots = placed("abc", 1, 2)
    fail(slots, "s0.r2")
    assert others(slots, now_s=59) == []
    assert reconcile(Goal((1,)), slots, 59).wake_s == 60
    assert [step.slot.id for step in others(slots, now_s=60) if isinstance(step, RemoveSlot)] == [SlotId(0, 2)]
    leave(slots, "s0.r2")
    leave(slots, "s0.r1")
    assert names(slots) == ["s0.r0", "s0.r1"], "the stage has no extra replicas any more"


def test_excess_workers_become_spares_first_and_then_extra_replicas() -> None:
    slots = Placement([1, 1], spares_wanted=2)
    joined = [join(slots, name) for name in "abcdefg"]
    assert joined == ["s0.r0", "s1.r0", "spare0", "spare1", "s0.r1", "s1.r1", "s0.r2"]
    leave(slots, "s0.r2")
    assert len(slots.of_stage(None)) == 2, "no spare takes the slot, which is removed"


def test_spare_takes_the_empty_slot_and_its_name_is_reserved_while_its_world_lives() -> None:
    slots = placed("abcde", spares=1)
    assert settle(slots) == []
    fail(slots, "s1.r1")
    assert settle(slots) == ["e"]
    assert (slot_named(slots, "s1.r1").ready, slots.of_stage(None)) == (True, [])
    assert join(slots, "d") == "spare1", "the world of spare0 serves as s1.r1"
    fail(slots, "s1.r1")
    assert settle(slots) == ["d"]
    assert join(slots, "f") == "spare0"


def test_spare_goes_to_the_stage_with_the_fewest_replicas() -> None:
    slots = placed("abcde", spares=1)
    for name in ("s0.r0", "s1.r0", "s1.r1"):
        fail(slots, name)
    [step] = others(slots)
    assert isinstance(step, Promote)
    assert step.slot.id.stage == 1


def test_spare_waits_for_the_workers_of_a_lost_leader() -> None:
    slots = placed("ab", 1, 1, spares=1)
    fail(slots, "s0.r0")
    waiting = reconcile(Goal((1,), settle_until_s=6.0), slots, 5.0)
    assert (waiting.now, waiting.wake_s) == ([], 6.0)
    assert any(isinstance(step, Promote) for step in reconcile(Goal((1,), settle_until_s=6.0), slots, 6.0).now)


def moved(slots: Placement, now_s: float) -> list[int | None]:
    return [step.worker.slot.stage for step in others(slots, now_s) if isinstance(step, WorkerStep)]


def test_empty_stage_gets_a_replica_of_the_largest_stage_after_a_while() -> None:
    slots = placed("abcdef", 3, 2)
    fail(slots, "s0.r0")
    fail(slots, "s1.r0")
    assert moved(slots, 100) == []
    fail(slots, "s0.r1")
    assert (moved(slots, 2.9), moved(slots, 3.0)) == ([], [2])
    fail(slots, "s2.r0")
    assert moved(slots, 3.0) == [], "no stage has more than one replica"


def returns(slots: Placement, worker: str, *held: int) -> str:
    return fill(slots, slots.slot_holding(held), worker)


@given(st.integers(1, 4), st.integers(1, 3), st.permutations(range(14)), st.permutations(range(14)))
def test_next_leader_has_the_layout_of_the_lost_one_when_all_workers_have_joined(
    num_stages: int, replicas: int, first: list[int], second: list[int]
) -> None:
    count = num_stages * replicas + 2
    one, other = (Placement([replicas] * num_stages, spares_wanted=1) for _ in range(2))
    places = {worker: join(one, str(worker)) for worker in first if worker < count}
    for worker in second:
        if worker < count and num_stages > 1:
            stage = places[worker].split(".")[0]
            held = range(num_stages) if stage == "spare0" else [int(stage[1:])]
            assert returns(other, str(worker), *held).split(".")[0] == stage


def test_worker_that_holds_a_stage_gets_it_if_it_has_a_free_slot_and_every_stage_has_a_worker() -> None:
    slots = placed("abc", 3, 2)
    assert [slots.choose_stage(held=[stage]) for stage in range(3)] == [0, 1, 2]
    fail(slots, "s1.r0")
    assert slots.choose_stage(held=[0]) == 1, "which has no worker"


def test_further_workers_join_the_stage_with_the_most_load() -> None:
    slots = placed("abcd")
    slots.wanted = (1.0, 3.0)
    assert [join(slots, name)[:2] for name in "efgh"] == ["s1", "s1", "s1", "s1"]
    assert [join(slots, name)[:2] for name in "ijkl"].count("s0") == 1
