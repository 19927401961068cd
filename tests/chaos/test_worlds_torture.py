"""Random operations and faults in random worlds: every result is correct, a fault ends only its own worlds, and nothing is left behind.

`MULTIWORLD_TORTURE_S` sets the duration and `MULTIWORLD_TORTURE_SEED` the seed; the default is fixed, and `make soak` draws new ones. A
failure prints the command that reproduces it.
"""

import os

import pytest

from tests.torture.worlds import run

DURATION_S = float(os.environ.get("MULTIWORLD_TORTURE_S", "15"))
SEED = int(os.environ.get("MULTIWORLD_TORTURE_SEED", "1"))


@pytest.mark.timeout(DURATION_S + 400)
async def test_results_are_correct_and_other_worlds_survive_random_faults() -> None:
    tally = await run(SEED, lasts_s=DURATION_S, say=print)
    print(tally)
    assert tally.verified
    assert tally.breaks or tally.rounds < 10
