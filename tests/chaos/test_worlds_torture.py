"""Random operations and faults in random worlds: every result is correct, a fault ends only its own worlds, and nothing is left behind.

`MULTIWORLD_TORTURE_S` sets the duration and `MULTIWORLD_TORTURE_SEED` the seed; the default is fixed, and `make soak` draws new ones. A
failure prints the command that reproduces it.
"""

import os

import pytest

from tests.torture.schedule import COLLECTIVES, OF_PROCESSES, OF_WORLDS, plan_round
from tests.torture.worlds import TortureError, run, torture

DURATION_S = float(os.environ.get("MULTIWORLD_TORTURE_S", "30"))
SEED = int(os.environ.get("MULTIWORLD_TORTURE_SEED", "1"))


@pytest.mark.timeout(DURATION_S + 400)
async def test_results_are_correct_and_other_worlds_survive_random_faults() -> None:
    tally = await run(SEED, lasts_s=DURATION_S, say=print)
    print(tally)
    assert tally.verified
    assert tally.breaks or tally.rounds < 10


def test_planned_round_is_reproducible() -> None:
    assert plan_round(7, 3) == plan_round(7, 3)
    assert plan_round(7, 3) != plan_round(7, 4)
    assert plan_round(7, 3) != plan_round(8, 3)


def test_every_kind_of_operation_and_fault_is_planned() -> None:
    rounds = [plan_round(1, number) for number in range(300)]
    phases = [phase for plan in rounds for world in plan.worlds for phase in world.phases]
    assert {collective.kind for phase in phases for collective in phase.collectives} == set(COLLECTIVES)
    assert any(len(phase.collectives) > 1 and phase.messages for phase in phases)
    assert {fault.kind for plan in rounds for fault in plan.faults} == {*OF_PROCESSES, *OF_WORLDS}
    assert {len(world.members) for plan in rounds for world in plan.worlds} == {2, 3, 4}


async def _failure_with(planted: str) -> str:
    """The failure that the torture test reports for members with this defect."""
    async with torture(1, ("leave",), planted) as running:
        try:
            for number in range(20):
                await running.run_round(number)
        except TortureError as error:
            return str(error)
    return "nothing"


async def test_wrong_result_is_reported_with_the_command_that_reproduces_it() -> None:
    told = await _failure_with("wrong messages")
    assert "WrongResultError" in told
    assert "elements differ, the first is" in told
    assert "python -m tests.torture.worlds --seed 1 --first-round" in told


async def test_fault_that_does_not_fire_is_reported() -> None:
    assert "did not fire" in await _failure_with("no faults")
