"""Runs all scenarios with new seeds until one fails or the time is over."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from multiworld_serving.testing.simulation.case import Case
from multiworld_serving.testing.simulation.scenarios import Scenario

_REPORT_EVERY_S = 30.0


@dataclass(slots=True)
class SoakResult:
    """Totals of a soak."""

    runs: int = 0
    events: int = 0
    failures: list[str] = field(default_factory=list)
    """One text per failure, with the commands that reproduce it."""


def soak(
    scenarios: Sequence[Scenario],
    *,
    first_seed: int,
    events: int,
    duration_s: float,
    processes: int,
    output: Callable[[str], None],
) -> SoakResult:
    """Run all scenarios with one seed, then with the next, until one fails or `duration_s` has passed.

    Args:
        events: number of events of each run.
        output: called with a line of progress every 30 s, and with every failure.
    """
    result = SoakResult()
    started_s = reported_s = time.monotonic()
    jobs = ((scenario, seed, events) for seed in itertools.count(first_seed) for scenario in scenarios)
    results = _results(jobs, processes, lambda: bool(result.failures) or time.monotonic() - started_s >= duration_s)
    for failure in results:
        result.runs += 1
        result.events += events
        if failure is not None:
            result.failures.append(failure)
            output(failure)
        if time.monotonic() - reported_s >= _REPORT_EVERY_S:
            reported_s = time.monotonic()
            output(f"{reported_s - started_s:.0f} s: {result.runs} runs, {result.events:,} events, no failure")
    return result


_Job = tuple[Scenario, int, int]


def _results(jobs: Iterator[_Job], processes: int, should_stop: Callable[[], bool]) -> Iterator[str | None]:
    """Yield the failure of each job, or None. After `should_stop()` no job is started; running jobs are awaited."""
    if processes == 1:
        while not should_stop():
            yield _run(next(jobs))
        return
    with ProcessPoolExecutor(processes) as pool:
        running: set[Future[str | None]] = set()
        while running or not should_stop():
            while len(running) < 2 * processes and not should_stop():
                running.add(pool.submit(_run, next(jobs)))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (each.result() for each in done)


def _run(job: _Job) -> str | None:
    scenario, seed, events = job
    case = Case(scenario, seed)
    failure = case.run(events)
    return None if failure is None else f"{scenario.name}, seed {seed}: {failure}\n{case.commands(events)}"
