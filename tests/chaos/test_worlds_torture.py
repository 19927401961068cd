"""Random operations and faults in random worlds: every result is correct, a fault ends only its own worlds, and nothing is left behind.

A failure prints the command that reproduces it.
"""

import itertools

import pytest

from tests.torture.worlds import run

DURATION_S = 15.0
SEED = 1
"""New seeds: `make soak`."""


@pytest.mark.timeout(DURATION_S + 400)
async def test_results_are_correct_and_other_worlds_survive_random_faults() -> None:
    tally = await run(SEED, itertools.count(), lasts_s=DURATION_S, say=print)
    print(tally)
    assert tally.verified
    assert tally.breaks or tally.rounds < 10
