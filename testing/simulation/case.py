"""Runs one scenario with one seed and describes the failure, with all that is needed to reproduce it."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from multiworld_serving.server.scheduling.scheduler import Action, Event, Scheduler, SchedulerConfig
from multiworld_serving.testing.simulation.scenarios import Scenario
from multiworld_serving.testing.simulation.simulator import Simulator
from multiworld_serving.testing.simulation.workload import Arrival, FaultInjected, Injection, Recording, Start

MIN_EVENTS = 3_000
"""A shorter run may have no fault, or the pipeline may be down for most of it."""

_EXPECTED_REFUSALS = {"kill": {"poison"}, "hang": {"poison"}, "raise": {"stage_error"}}


@dataclass(frozen=True, slots=True)
class Failure:
    """A broken invariant or a wrong outcome."""

    error: Exception
    is_outcome_failure: bool
    """The scheduler kept its invariants, but a request did not get the result that the scenario requires."""
    location: tuple[str, int]
    """File and line of the failed assertion; two failures with the same location count as the same."""
    recording: Recording
    events: int
    time_s: float
    trace: tuple[tuple[float, Event, list[Action]], ...] | None

    def __str__(self) -> str:
        what = str(self.error) or linecache.getline(*self.location).strip()
        return f"{type(self.error).__name__}: {what} (event {self.events}, t={self.time_s:.6f} s)"

    def describe(self) -> str:
        """Return the error, its injections, then (if traced) every event with the resulting actions, in order of time."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield str(self)
        yield f"{len(self.recording.injections)} injections:"
        for injection in self.recording.injections:
            yield f"  t={injection.at_s:.6f}  {_describe(injection)}"
        if self.trace is not None:
            yield f"{len(self.trace)} events, each with the actions of the scheduler:"
            for time_s, event, actions in self.trace:
                yield f"  t={time_s:.6f}  {event}"
                yield from (f"      -> {action}" for action in actions)


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario and a seed: a reproducible run."""

    scenario: Scenario
    seed: int
    scheduler: Callable[[SchedulerConfig], Scheduler] = Scheduler

    def run(self, max_events: int) -> Failure | None:
        """Run a random workload. Returns the failure, or None."""
        simulator = self._simulator()
        return _run_case(simulator, lambda: simulator.run(max_events))

    def play(self, recording: Recording, *, traced: bool = False) -> Failure | None:
        """Replay a recording. Returns the failure, or None.

        Args:
            traced: record all events and actions in `Failure.trace`.
        """
        simulator = self._simulator()
        simulator.trace = [] if traced else None
        return _run_case(simulator, lambda: simulator.play(recording))

    def commands(self, events: int) -> str:
        """Return the commands that replay and shrink this run, from the root of the repository."""
        options = f"--scenario {self.scenario.name} --seed {self.seed} --events {events}"
        program = "python -m multiworld_serving.testing.simulation"
        return f"  replay: {program} replay {options}\n  shrink: {program} shrink {options}"

    def _simulator(self) -> Simulator:
        return Simulator(self.scenario, self.seed, scheduler=self.scheduler)


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


def check_coverage(simulator: Simulator) -> None:
    """Assert that a random run tested something: requests were answered and faults had an effect. Raises AssertionError."""
    scenario = simulator.scenario
    healthy = [outcome for request, outcome in simulator.outcomes.items() if request not in simulator.compute_outcomes]
    if simulator.events >= MIN_EVENTS:
        assert healthy.count("answered") > 0.3 * len(healthy) or "overloaded" in scenario.allowed_refusals, (
            "fewer than 30 % of the requests were answered"
        )
        assert not scenario.faults or simulator.faults_injected, "no fault had an effect"


def _run_case(simulator: Simulator, run: Callable[[], None]) -> Failure | None:
    ran = False
    try:
        run()
        ran = True
        check_outcomes(simulator)
    except Exception as error:  # noqa: BLE001 - every exception is a failure of the run
        frame = traceback.extract_tb(error.__traceback__)[-1]
        trace = None if simulator.trace is None else tuple(simulator.trace)
        location = (frame.filename, frame.lineno or 0)
        error.__traceback__ = None  # it would keep the objects of the whole run in memory
        return Failure(error, ran, location, simulator.recording, simulator.events, simulator.event_queue.now_s, trace)
    return None


def _describe(injection: Injection) -> str:
    match injection:
        case Arrival():
            outcome, cancel_s = injection.compute_outcome, injection.cancel_after_s
            text = f"request {injection.request} arrives, timeout {injection.timeout_s:.6f} s"
            text += f", key {injection.key}" if injection.key else ""
            text += "" if outcome == "answer" else f", compute outcome {outcome}"
            return text if cancel_s is None else f"{text}, cancelled after {cancel_s:.6f} s"
        case Start():
            return f"worker {injection.worker} joins stage {injection.stage}"
        case FaultInjected():
            return f"fault {injection.fault} at {injection.worker}"
