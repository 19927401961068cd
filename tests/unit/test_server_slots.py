"""Which stage a newcomer gets, who steps in for whom."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from server.link import Link
from server.predictor import ReplicaState
from server.slots import Slot, Slots
from wire import JoinRequest


class FakeLink:
    """What `Slots` looks at."""

    def __init__(self, worker: str, slot: Slot, state: ReplicaState = "ready", host: str = "h") -> None:
        self.worker = worker
        self.request = JoinRequest(worker, "cpu", host, 1)
        self.state = state
        self.slot = slot
        self.world_name = slot.name


def join(slots: Slots, worker: str, host: str = "h") -> str:
    slot = slots.choose(host)
    slot.link = cast(Link, FakeLink(worker, slot, host=host))
    return slot.name


def fail(slots: Slots, name: str) -> None:
    slot = next(slot for slot in (*slots.all, *slots.spares) if slot.name == name)
    assert slot.link is not None
    slot.link.state = "broken"


def test_newcomers_spread_evenly_over_the_stages() -> None:
    slots = Slots(2, 2)
    assert [join(slots, name) for name in "abcd"] == ["s0.r0", "s1.r0", "s0.r1", "s1.r1"]


def test_replicas_of_a_stage_are_spread_over_hosts_when_workers_come_in_turn() -> None:
    slots = Slots(2, 2)
    places = {(host, join(slots, f"{host}{number}", host)[:2]) for number in range(2) for host in ("left", "right")}
    assert places == {(host, stage) for host in ("left", "right") for stage in ("s0", "s1")}


def test_newcomer_gets_the_slot_of_the_one_that_broke() -> None:
    slots = Slots(2, 2)
    for name in "abcd":
        join(slots, name)
    fail(slots, "s1.r0")
    assert join(slots, "e") == "s1.r0"


def leave(slots: Slots, name: str) -> None:
    slot = next(slot for slot in slots.all if slot.name == name)
    fail(slots, name)
    slots.left(slot)


def names(slots: Slots) -> list[str]:
    return [slot.name for slot in slots.all]


def test_stage_is_as_small_as_it_was_when_further_replicas_have_left() -> None:
    slots = Slots(2, 2)
    for name in "abcdef":
        join(slots, name)
    assert names(slots) == ["s0.r0", "s0.r1", "s0.r2", "s1.r0", "s1.r1", "s1.r2"]
    leave(slots, "s0.r0")  # whoever it is
    leave(slots, "s1.r2")
    assert names(slots) == ["s0.r1", "s0.r2", "s1.r0", "s1.r1"]
    assert not any(slot.free for slot in slots.all)
    assert [join(slots, name) for name in "gh"] == ["s0.r0", "s1.r2"]


def test_slot_stays_when_its_worker_failed_or_the_stage_has_no_more_than_it_is_to_have() -> None:
    slots = Slots(1, 2)
    for name in "abc":
        join(slots, name)
    fail(slots, "s0.r2")  # it is expected back
    assert names(slots) == ["s0.r0", "s0.r1", "s0.r2"]
    leave(slots, "s0.r2")
    leave(slots, "s0.r1")
    assert names(slots) == ["s0.r0", "s0.r1"]


def test_more_workers_than_slots_become_spares_first_and_then_further_replicas() -> None:
    slots = Slots(2, 1, spares_wanted=2)
    assert [join(slots, name) for name in "abcdefg"] == [
        "s0.r0",
        "s1.r0",
        "spare0",
        "spare1",
        "s0.r1",
        "s1.r1",
        "s0.r2",
    ]


def test_worker_that_asks_again_is_recognised_while_its_link_lives() -> None:
    slots = Slots(1, 2, spares_wanted=1)
    for name in "abc":
        join(slots, name)
    assert slots.former_self("a") is slots.all[0].link
    assert slots.former_self("c") is slots.spares[0].link
    assert slots.former_self("d") is None
    fail(slots, "s0.r0")
    assert slots.former_self("a") is None


def test_spare_takes_the_slot_that_falls_empty_and_its_name_is_not_used_while_its_world_lives() -> None:
    slots = Slots(2, 2, spares_wanted=1)
    for name in "abcde":
        join(slots, name)
    assert list(slots.take_over()) == []
    fail(slots, "s1.r1")
    ((slot, link),) = slots.take_over()
    assert (slot.name, link.worker, link.slot is slot, slots.spares) == ("s1.r1", "e", True, [])
    assert join(slots, "d") == "spare1", "the world spare0 serves as s1.r1"
    fail(slots, "s1.r1")
    assert [link.worker for _, link in slots.take_over()] == ["d"]
    assert join(slots, "f") == "spare0"


def test_spare_that_is_not_ready_takes_nothing() -> None:
    slots = Slots(1, 1, spares_wanted=1)
    for name in "ab":
        join(slots, name)
    assert slots.spares[0].link is not None
    slots.spares[0].link.state = "warming"
    fail(slots, "s0.r0")
    assert list(slots.take_over()) == []


def test_spare_goes_to_the_stage_that_has_fewest_left() -> None:
    slots = Slots(2, 2, spares_wanted=1)
    for name in "abcde":
        join(slots, name)
    for name in ("s0.r0", "s1.r0", "s1.r1"):
        fail(slots, name)
    ((slot, _),) = slots.take_over()
    assert slot.stage == 1


def test_stage_that_has_nobody_gets_one_of_the_richest_that_keeps_another() -> None:
    slots = Slots(3, 2)
    for name in "abcdef":
        join(slots, name)
    assert (list(slots.without_worker()), slots.donor() is not None) == ([], True)
    fail(slots, "s0.r0")
    fail(slots, "s0.r1")
    fail(slots, "s1.r0")
    donor = slots.donor()
    assert list(slots.without_worker()) == [0]
    assert donor is not None
    assert donor.slot.stage == 2
    fail(slots, "s2.r0")
    assert slots.donor() is None, "every stage that has anybody has but one"


def test_epochs_count_for_each_world_name() -> None:
    slots = Slots(1, 1)
    assert [slots.next_epoch("s0.r0"), slots.next_epoch("spare0"), slots.next_epoch("s0.r0")] == [1, 1, 2]


@given(st.integers(1, 5), st.integers(1, 4), st.lists(st.integers(0, 30), max_size=40))
def test_no_stage_is_ahead_of_another_by_more_than_the_failures_explain(
    num_stages: int, replicas: int, breaks: list[int]
) -> None:
    slots = Slots(num_stages, replicas)
    for number in range(num_stages * replicas):
        join(slots, str(number))
    for number in breaks:
        slot = slots.all[number % len(slots.all)]
        if slot.link is not None:
            slot.link.state = "broken"
        join(slots, f"again-{number}")
        taken = [sum(not slot.free for slot in slots.of_stage(stage)) for stage in range(num_stages)]
        assert max(taken) - min(taken) <= 1
        assert len(slots.all) == num_stages * replicas, "a broken slot is used again before a new one is made"


def test_slots_are_whole_when_every_stage_has_its_replicas_and_nobody_is_on_the_way() -> None:
    slots = Slots(2, 2)
    for name in "abcd":
        assert not slots.whole
        join(slots, name)
    assert slots.whole
    join(slots, "e")
    assert slots.whole, "with a further replica of stage 0"
    (further,) = [slot for slot in slots.all if slot.index == 2]
    assert further.link is not None
    further.link.state = "loading"
    assert not slots.whole
    fail(slots, further.name)
    assert slots.whole, "who is gone beyond the replicas is not missed"
    fail(slots, "s1.r0")
    assert not slots.whole
    join(slots, "f")
    assert slots.whole
