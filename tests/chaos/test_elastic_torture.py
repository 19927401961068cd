"""Half a minute of the torture test of elastic worlds, and tests of its model and its schedule."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.chaos.elastic_model import explains, operand, sets_of_participants
from tests.chaos.elastic_schedule import LOSSES, OPS, Schedule
from tests.torture.worlds import seconds

DURATION_S = float(os.environ.get("MULTIWORLD_TORTURE_S", "30"))
SEED = int(os.environ.get("MULTIWORLD_TORTURE_SEED", "1"))
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(DURATION_S + 300)
def test_survivors_have_correct_results_and_stable_resources_under_random_faults() -> None:
    command = [sys.executable, "-m", "tests.chaos.elastic_torture", "--seed", str(SEED), "--duration", f"{DURATION_S}s"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tensors verified" in done.stdout


def test_schedule_is_reproducible_and_contains_every_kind_of_step() -> None:
    schedule, again = Schedule(7), Schedule(7)
    steps = [schedule.next() for _ in range(400)]
    assert steps == [again.next() for _ in range(400)]
    assert steps[:50] != [Schedule(8).next() for _ in range(50)]
    assert {fault.kind for step in steps for fault in step.faults} == {*LOSSES, "cut", "pause"}
    calls = [step.call for step in steps if step.call is not None]
    assert {call.op for call in calls} == set(OPS)
    assert any(count == 0 for call in calls for _, count in call.tensors)
    assert any(step.restart_after_s is not None for step in steps)
    assert any(step.doomed for step in steps)
    for step in steps:
        assert step.members_after, "at least one member is left"
        assert step.lost <= set(step.members)


@pytest.mark.parametrize("op", OPS[:4])
def test_model_distinguishes_results_of_different_members(op: str) -> None:
    brought = {member: operand("key", member, 0, "float32", 1000, op) for member in (1, 2, 3)}

    def fits(result: torch.Tensor, members: tuple[int, ...]) -> bool:
        return explains(result, [brought[m] for m in members], op)

    stacked = torch.stack([brought[member] for member in (1, 2, 3)])
    everybody = {"MIN": stacked.amin(0), "MAX": stacked.amax(0)}.get(op, stacked.sum(0) / (3 if op == "AVG" else 1))
    assert fits(everybody, (1, 2, 3))
    assert not any(fits(everybody, pair) for pair in ((1, 2), (1, 3), (2, 3)))
    everybody[17] = torch.nan
    assert not fits(everybody, (1, 2, 3))


def test_participants_are_all_sets_that_include_the_present_members() -> None:
    assert list(sets_of_participants((5, 2, 3, 4), {3}, 3)) == [(5, 2, 3), (5, 3, 4), (2, 3, 4)]
    assert list(sets_of_participants((1, 2), {1, 2}, 2)) == [(1, 2)]


@pytest.mark.parametrize(("text", "expected"), [("60s", 60), ("30m", 1800), ("2h", 7200), ("1.5", 1.5)])
def test_durations_are_parsed_with_their_unit(text: str, expected: float) -> None:
    assert seconds(text) == expected
