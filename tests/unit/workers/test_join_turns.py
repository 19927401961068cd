"""What the connections of a worker tell each other when they join leaders."""

import asyncio

import pytest

from multiworld_serving.workers import join_turns
from multiworld_serving.workers.join_turns import JoinTurns
from tests.resnets import resnet_plan

WAIT_S = 60.0
FIRST, LAST = (plan.spec for plan in resnet_plan("random:0", 2, image_size=32))


async def test_next_leader_is_asked_when_the_stage_is_assigned() -> None:
    turns = JoinTurns()
    with turns.joining() as one, turns.joining() as other:
        assert await one.begin_turn() == ("", False)
        second = asyncio.create_task(other.begin_turn())
        await asyncio.sleep(0)
        assert not second.done()
        one.assigned(LAST)
        async with asyncio.timeout(WAIT_S):
            assert await second == (LAST.part, True)


async def test_next_leader_is_asked_when_the_first_one_has_no_place() -> None:
    turns = JoinTurns()
    with turns.joining() as other:
        with turns.joining() as one:
            await one.begin_turn()
            second = asyncio.create_task(other.begin_turn())
            await asyncio.sleep(0)
        async with asyncio.timeout(WAIT_S):
            assert await second == ("", False)


async def test_leader_that_assigns_nothing_delays_the_next_one_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(join_turns, "LONGEST_TURN_S", 0.01)
    turns = JoinTurns()
    with turns.joining() as one, turns.joining() as other, turns.joining() as third:
        await one.begin_turn()
        async with asyncio.timeout(WAIT_S):
            await other.begin_turn()
            await third.begin_turn()


async def test_stage_served_last_is_told_when_no_leader_assigns_one_now() -> None:
    turns = JoinTurns()
    with turns.joining() as one:
        await one.begin_turn()
        one.assigned(FIRST)
        assert turns.hint == (FIRST.part, True)
    assert turns.hint == (FIRST.part, False)


def test_part_is_the_same_for_all_versions_and_differs_between_stages() -> None:
    other = resnet_plan("random:1", 2, image_size=32)
    assert [plan.spec.part for plan in other] == [FIRST.part, LAST.part]
    assert FIRST.part != LAST.part
