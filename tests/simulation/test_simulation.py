"""The scheduler with simulated workers: every seed is a run whose invariants are checked after every event."""

from __future__ import annotations

from typing import get_args

import pytest

from multiworld_serving.server.scheduling.scheduler import Answer, SchedulerConfig
from multiworld_serving.testing.simulation.case import Case, check_coverage, check_outcomes
from multiworld_serving.testing.simulation.scenarios import SCENARIOS, Fault, Load, Scenario, Tail
from multiworld_serving.testing.simulation.simulator import Simulator
from tests.simulation.conftest import EVENTS, SEEDS


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scheduler_keeps_its_invariants_under_random_faults(scenario: Scenario, sim_seed: int, sim_events: int) -> None:
    simulator = Simulator(scenario, sim_seed)
    try:
        simulator.run(sim_events)
        check_outcomes(simulator)
        check_coverage(simulator)
    except Exception as error:
        case = Case(scenario, sim_seed)
        error.add_note(
            f"seed {sim_seed}, event {simulator.events}, t={simulator.event_queue.now_s:.6f} s\n{case.commands(sim_events)}"
        )
        raise


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
    answers = [action for _, _, actions in simulator.trace for action in actions if isinstance(action, Answer)]
    assert max(answer.attempts for answer in answers) == 2, "a request loses one output at most"


def test_scenarios_cover_every_event() -> None:
    assert len(SCENARIOS) * len(SEEDS) * EVENTS >= 1_000_000
    assert {fault for scenario in SCENARIOS for fault in scenario.faults} == set(get_args(Fault))
    assert {scenario.load for scenario in SCENARIOS} == set(get_args(Load))
    assert {scenario.tail for scenario in SCENARIOS} == set(get_args(Tail))
    for share in ("cancelled", "poison", "hanging", "failing", "flaky"):
        assert any(getattr(scenario, share) for scenario in SCENARIOS)


@pytest.mark.parametrize("name", ["everything-and-versions-and-moves", "doubles", "kills-in-turn"])
def test_recording_gives_the_same_run_when_replayed(name: str) -> None:
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == name)
    first, again, played = (Simulator(scenario, 7) for _ in range(3))
    for simulator in (first, again, played):
        simulator.trace = []
    first.run(2000)
    again.run(2000)
    played.play(first.recording)
    assert first.trace
    assert again.trace == first.trace
    assert played.trace == first.trace
    assert played.outcomes == first.outcomes
