"""The scheduler with simulated workers: every seed is a run whose invariants are checked after every event."""

from collections import Counter

import pytest

from multiworld_serving.server.leader.scheduling.config import SchedulerConfig
from multiworld_serving.server.leader.scheduling.events import RequestArrived
from tests.simulation.scenarios import SCENARIOS, Scenario
from tests.simulation.simulator import Simulator, check_outcomes, run_case

SEED = 1
"""New seeds: `make soak`."""
EVENTS = 24_000


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scheduler_keeps_its_invariants_under_random_faults(scenario: Scenario) -> None:
    simulator = run_case(scenario, SEED, EVENTS)
    healthy = [outcome for request, outcome in simulator.outcomes.items() if request not in simulator.compute_outcomes]
    assert healthy.count("answered") > 0.3 * len(healthy) or "overloaded" in scenario.allowed_refusals
    assert not scenario.faults or simulator.faults_injected, "no fault had an effect"


def test_requests_are_answered_and_goodput_recovers_when_all_edges_between_workers_are_cut() -> None:
    scenario = Scenario(
        name="cut", config=SchedulerConfig(num_stages=2), edges=True, load="closed", timeout_s=(20.0, 30.0)
    )
    simulator = Simulator(scenario, 1)
    simulator.trace = []
    answered: list[int] = []

    def cut() -> None:
        for one in simulator.workers:
            for other in simulator.workers:
                simulator.data_plane.cut(one, other, 5.0)

    simulator.event_queue.at(5.0, cut)
    for at_s in (1.0, 5.0, 6.0, 10.0, 11.0, 15.0):
        simulator.event_queue.at(
            at_s, lambda: answered.append(sum(outcome == "answered" for outcome in simulator.outcomes.values()))
        )
    simulator.run(30_000)
    check_outcomes(simulator)
    assert len(answered) == 6, "the run is too short"
    before, during, after = (answered[index + 1] - answered[index] for index in (0, 2, 4))
    assert during > 0.05 * before, "the outputs are sent through the leader"
    assert after > 0.9 * before
    arrivals = Counter(event.request for _, event, _ in simulator.trace if isinstance(event, RequestArrived))
    assert max(arrivals.values()) == 2, "a request is sent again once at most"
