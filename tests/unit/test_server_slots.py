"""Which stage a newcomer gets."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from server.link import Link
from server.slots import Slots


class FakeLink:
    """What `Slots` looks at."""

    def __init__(self, worker: str, state: str = "ready") -> None:
        self.worker = worker
        self.state = state


def join(slots: Slots, worker: str) -> tuple[int, int]:
    slot = slots.choose()
    slot.link = cast(Link, FakeLink(worker))
    return slot.stage, slot.index


def test_newcomers_spread_evenly_over_the_stages() -> None:
    slots = Slots(2, 2)
    assert [join(slots, name) for name in "abcd"] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_newcomer_gets_the_slot_of_the_one_that_broke() -> None:
    slots = Slots(2, 2)
    for name in "abcd":
        join(slots, name)
    broken = slots.of_stage(1)[0].link
    assert broken is not None
    broken.state = "broken"
    assert join(slots, "e") == (1, 0)


def test_more_workers_than_slots_become_further_replicas() -> None:
    slots = Slots(2, 1)
    assert [join(slots, name) for name in "abcde"] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]


def test_worker_that_asks_again_is_recognised_while_its_link_lives() -> None:
    slots = Slots(1, 2)
    join(slots, "a")
    link = slots.former_self("a")
    assert link is not None
    assert slots.former_self("b") is None
    link.state = "broken"
    assert slots.former_self("a") is None


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
