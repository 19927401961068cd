"""Fresh seeds for hours: every scenario in turn, until one fails or the time is up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field

from simulation.report import replay_command, shrink_command
from simulation.scenario import Scenario
from simulation.verdict import Case

_REPORT_EVERY_S = 30.0


@dataclass(slots=True)
class Tally:
    """What a soak has come to."""

    runs: int = 0
    events: int = 0
    failures: list[str] = field(default_factory=list)
    """What broke, and how to have it again."""


def soak(
    scenarios: Sequence[Scenario],
    *,
    first_seed: int,
    events: int,
    lasts_s: float,
    processes: int,
    say: Callable[[str], None],
) -> Tally:
    """Run all scenarios with one seed, then with the next, until a promise breaks or `lasts_s` are over.

    Args:
        events: of each run.
        say: is told how it goes every half minute, and of every failure.
    """
    tally = Tally()
    started_s = told_s = time.monotonic()
    jobs = ((scenario, seed, events) for seed in itertools.count(first_seed) for scenario in scenarios)
    endless = _results(jobs, processes, lambda: bool(tally.failures) or time.monotonic() - started_s >= lasts_s)
    for failure in endless:
        tally.runs += 1
        tally.events += events
        if failure is not None:
            tally.failures.append(failure)
            say(failure)
        if time.monotonic() - told_s >= _REPORT_EVERY_S:
            told_s = time.monotonic()
            say(f"{told_s - started_s:.0f} s: {tally.runs} runs, {tally.events:,} events, nothing broken")
    return tally


_Job = tuple[Scenario, int, int]


def _results(jobs: Iterator[_Job], processes: int, enough: Callable[[], bool]) -> Iterator[str | None]:
    """One job's failure, or None, after the other. No new job begins when it is enough; those that run are awaited."""
    if processes == 1:
        while not enough():
            yield _run(next(jobs))
        return
    with ProcessPoolExecutor(processes) as pool:
        running: set[Future[str | None]] = set()
        while running or not enough():
            while len(running) < 2 * processes and not enough():
                running.add(pool.submit(_run, next(jobs)))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (each.result() for each in done)


def _run(job: _Job) -> str | None:
    scenario, seed, events = job
    case = Case(scenario, seed)
    failure = case.run(events)
    if failure is None:
        return None
    return (
        f"{scenario.name}, seed {seed}: {failure}\n"
        f"  replay: {replay_command(case, events)}\n  shrink: {shrink_command(case, events)}"
    )
