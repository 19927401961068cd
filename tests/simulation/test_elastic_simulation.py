"""Elastic worlds under kills, freezes, partitions, newcomers and restarts of the rendezvous server, at random times from a seed."""

import pytest

from tests.simulation.elastic_cluster import SCENARIOS, Scenario, replay

SCHEDULES = 60
"""Of each scenario."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_survivors_agree_or_fail_alike_under_random_faults(scenario: Scenario) -> None:
    for seed in range(SCHEDULES):
        replay(scenario.name, seed)
