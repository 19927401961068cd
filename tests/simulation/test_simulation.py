"""The scheduler under every kind of load and misfortune. All promises are asserted after every event (checker.py)."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.scenarios import SCENARIOS, Scenario
from tests.simulation.simulator import Simulator

_ENOUGH_EVENTS = 3_000
"""In a shorter run it may be that no fault fired, or that the pipeline was just down."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scheduler_keeps_its_promises_when_simulated(
    scenario: Scenario, sim_seed: int, sim_events: int, request: pytest.FixtureRequest
) -> None:
    simulator = Simulator(scenario, sim_seed)
    try:
        simulator.run(sim_events)
    except Exception as error:
        error.add_note(
            f"seed {sim_seed}, event {simulator.events}, t={simulator.agenda.now_s:.6f} s. Replay:\n"
            f'pytest "{request.node.nodeid}" --sim-seed {sim_seed} --sim-events {sim_events}'
        )
        raise
    _check_outcomes(simulator)


def _check_outcomes(simulator: Simulator) -> None:
    """Beyond the promises: what a whole run must have come to."""
    scenario, outcomes = simulator.scenario, simulator.checker.outcomes
    print(simulator.events, simulator.agenda.now_s, Counter(outcomes.values()), simulator.scheduler.counters)
    permitted = {"answered", "cancelled", "not_ready", "draining", *scenario.permits}
    healthy = Counter(outcome for request, outcome in outcomes.items() if request not in simulator.fates)
    assert set(healthy) <= permitted, "a healthy request was refused for no good reason"
    guilty = {"kill": "poison", "hang": "poison", "raise": "stage_error"}
    for request, fate in simulator.fates.items():
        assert outcomes[request] in {guilty[fate], "cancelled", "draining", *scenario.permits}
    if simulator.events >= _ENOUGH_EVENTS:
        assert healthy["answered"] > 0.3 * sum(healthy.values()) or "overloaded" in scenario.permits
        assert not scenario.faults or simulator.faults, "no fault did fire"


def test_simulation_repeats_itself_when_given_the_same_seed() -> None:
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == "everything")
    first, second = Simulator(scenario, 7), Simulator(scenario, 7)
    first.run(2000)
    second.run(2000)
    assert first.checker.outcomes == second.checker.outcomes
    assert first.agenda.now_s == second.agenda.now_s
