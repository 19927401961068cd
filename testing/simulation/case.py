"""Runs one scenario with one seed, and checks the results of its requests."""

from __future__ import annotations

from collections.abc import Callable

from multiworld_serving.server.scheduling.scheduler import Action, Event, Scheduler, SchedulerConfig
from multiworld_serving.testing.simulation.scenarios import Scenario
from multiworld_serving.testing.simulation.simulator import Simulator

Trace = list[tuple[float, Event, list[Action]]]
"""Every event with its time and the resulting actions."""

_EXPECTED_REFUSALS = {"kill": {"poison"}, "hang": {"poison"}, "raise": {"stage_error"}}


def run_case(
    scenario: Scenario,
    seed: int,
    max_events: int,
    *,
    scheduler: Callable[[SchedulerConfig], Scheduler] = Scheduler,
    trace: Trace | None = None,
) -> Simulator:
    """Run a random workload and check it.

    Args:
        scheduler: factory of the scheduler; tests pass schedulers with deliberate bugs.
        trace: gets the events and actions.
    Raises:
        AssertionError, Exception: the scheduler broke an invariant, or failed. A note says how to reproduce it.
    """
    simulator = Simulator(scenario, seed, scheduler=scheduler)
    simulator.trace = trace
    try:
        simulator.run(max_events)
        check_outcomes(simulator)
    except Exception as error:
        at = f"{scenario.name}, seed {seed}, event {simulator.events}, t={simulator.event_queue.now_s:.6f} s"
        options = f"--scenario {scenario.name} --seed {seed} --events {max_events} --trace"
        error.add_note(f"{at}\nreplay: python -m multiworld_serving.testing.simulation {options}")
        raise
    return simulator


def check_outcomes(simulator: Simulator) -> None:
    """Assert that every request got a result that the scenario allows. Raises AssertionError."""
    scenario, outcomes, compute_outcomes = simulator.scenario, simulator.outcomes, simulator.compute_outcomes
    always_allowed = {"cancelled", "handed_back", "not_ready", "draining", *scenario.allowed_refusals}
    healthy = {outcome for request, outcome in outcomes.items() if request not in compute_outcomes}
    wrong = healthy - always_allowed - {"answered"}
    assert not wrong, f"healthy requests were refused as {sorted(wrong)}"
    for request, compute_outcome in compute_outcomes.items():
        allowed = always_allowed | _EXPECTED_REFUSALS[compute_outcome]
        assert outcomes[request] in allowed, f"a request with compute outcome {compute_outcome} was {outcomes[request]}"
