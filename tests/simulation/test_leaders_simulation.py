"""Frontends with the real pool of leaders, and leaders with real schedulers that fail: invariants of every request."""

from __future__ import annotations

import pytest

from multiworld_serving.server.frontends import leader_pool
from multiworld_serving.testing.simulation.leaders.__main__ import main
from multiworld_serving.testing.simulation.leaders.run import SCENARIOS, LeaderRun, LeaderScenario

SECONDS = 20.0
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_requests_get_one_result_in_time_when_leaders_fail(scenario: LeaderScenario, sim_seed: int) -> None:
    run = LeaderRun(scenario, sim_seed)
    run.run(SECONDS)
    assert list(run.outcomes.values()).count("answered") > 0.3 * len(run.outcomes)
    assert run.faults or not scenario.faults, "no fault was injected"


def test_same_seed_gives_the_same_run() -> None:
    first, again = (LeaderRun(BY_NAME["everything"], 5) for _ in range(2))
    first.run(5.0)
    again.run(5.0)
    assert first.outcomes
    assert (again.outcomes, again.trails, again.faults) == (first.outcomes, first.trails, first.faults)


def test_command_replays_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(leader_pool, "_MAX_LEADER_FAILURES", 9)
    assert main(["--scenario", "poison", "--seconds", "10"]) == 1
    printed = capsys.readouterr().out
    assert "sent again after two leaders were lost with it" in printed
    _, _, command = printed.rpartition("simulation.leaders ")
    assert main(command.split()) == 1
    assert capsys.readouterr().out == printed
    monkeypatch.undo()
    assert main(command.split()) == 0


def test_healthy_requests_are_answered_late_or_not_at_all_when_nobody_sends_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scenario in which every request must be answered depends on the requests that are sent again."""
    monkeypatch.setattr(leader_pool, "_MAX_LEADER_FAILURES", 1)
    assert main(["--scenario", "one-leader-at-a-time", "--seconds", "40"]) == 1
