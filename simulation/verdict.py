"""Whether a run was as it should be, and if not, everything needed to have it again."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from server.scheduler import Action, Event, Scheduler, SchedulerConfig
from simulation.injections import Recording
from simulation.scenario import Scenario
from simulation.simulator import Simulator

ENOUGH_EVENTS = 3_000
"""In a shorter run it may be that no misfortune struck, or that the pipeline was just down."""

_GUILTY = {"kill": {"poison"}, "hang": {"poison"}, "raise": {"stage_error"}}


@dataclass(frozen=True, slots=True)
class Failure:
    """A broken promise."""

    error: Exception
    of_outcome: bool
    """No rule of the scheduler was broken, but a request did not get what the scenario promises."""
    place: tuple[str, int]
    """File and line where it was noticed: two failures are taken for the same if they agree in it."""
    recording: Recording
    events: int
    time_s: float
    trace: tuple[tuple[float, Event, list[Action]], ...] | None

    def __str__(self) -> str:
        what = str(self.error) or _source_line(self.error)
        return f"{type(self.error).__name__}: {what} (event {self.events}, t={self.time_s:.6f} s)"


@dataclass(frozen=True, slots=True)
class Case:
    """What can be run and run again."""

    scenario: Scenario
    seed: int
    scheduler: Callable[[SchedulerConfig], Scheduler] = Scheduler

    def run(self, max_events: int) -> Failure | None:
        """By chance."""
        simulator = self._simulator()
        return _attempt(simulator, lambda: simulator.run(max_events))

    def play(self, recording: Recording, *, traced: bool = False) -> Failure | None:
        """As recorded. `traced`: note all events and actions."""
        simulator = self._simulator()
        simulator.trace = [] if traced else None
        return _attempt(simulator, lambda: simulator.play(recording))

    def _simulator(self) -> Simulator:
        return Simulator(self.scenario, self.seed, scheduler=self.scheduler)


def check_outcomes(simulator: Simulator) -> None:
    """Beyond the scheduler's promises: what a whole run must have come to. Raises AssertionError."""
    scenario, outcomes, fates = simulator.scenario, simulator.outcomes, simulator.fates
    permitted = {"answered", "cancelled", "not_ready", "draining", *scenario.permits}
    healthy = Counter(outcome for request, outcome in outcomes.items() if request not in fates)
    assert set(healthy) <= permitted, f"healthy requests were refused as {sorted(set(healthy) - permitted)}"
    for request, fate in fates.items():
        due = {*_GUILTY[fate], "cancelled", "not_ready", "draining", *scenario.permits}
        assert outcomes[request] in due, f"a request that would {fate} was {outcomes[request]}"


def check_liveliness(simulator: Simulator) -> None:
    """A run by chance must have been worth it: work was done, misfortunes struck. Raises AssertionError."""
    scenario = simulator.scenario
    healthy = [outcome for request, outcome in simulator.outcomes.items() if request not in simulator.fates]
    if simulator.events >= ENOUGH_EVENTS:
        assert healthy.count("answered") > 0.3 * len(healthy) or "overloaded" in scenario.permits, "hardly any answers"
        assert not scenario.faults or simulator.struck, "no misfortune struck"


def _attempt(simulator: Simulator, run: Callable[[], None]) -> Failure | None:
    ran = False
    try:
        run()
        ran = True
        check_outcomes(simulator)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        frame = traceback.extract_tb(error.__traceback__)[-1]
        trace = None if simulator.trace is None else tuple(simulator.trace)
        place = (frame.filename, frame.lineno or 0)
        error.__traceback__ = None  # it would keep the whole run alive
        return Failure(error, ran, place, simulator.recording, simulator.events, simulator.agenda.now_s, trace)
    return None


def _source_line(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].line or "" if frames else ""
