"""A failure for people: what broke, how to have it again, and what little it takes."""

from __future__ import annotations

from collections.abc import Iterator

from simulation.injections import Arrival, Injection, Start, Strike
from simulation.verdict import Case, Failure


def replay_command(case: Case, events: int) -> str:
    """What runs exactly this again, from the root of the repository."""
    return _command("replay", case, events)


def shrink_command(case: Case, events: int) -> str:
    """What runs it again and shrinks it."""
    return _command("shrink", case, events)


def describe(failure: Failure) -> str:
    """The injections, then every event with the scheduler's actions, in order of time."""
    return "\n".join(_lines(failure))


def _lines(failure: Failure) -> Iterator[str]:
    yield str(failure)
    yield f"{len(failure.recording.injections)} injections:"
    for injection in failure.recording.injections:
        yield f"  t={injection.at_s:.6f}  {_describe(injection)}"
    if failure.trace is not None:
        yield f"{len(failure.trace)} events, each with what the scheduler made of it:"
        for time_s, event, actions in failure.trace:
            yield f"  t={time_s:.6f}  {event}"
            yield from (f"      -> {action}" for action in actions)


def _describe(injection: Injection) -> str:
    match injection:
        case Arrival():
            fate = "" if injection.fate == "answer" else f", which will {injection.fate}"
            cancel = injection.cancel_after_s
            gone = "" if cancel is None else f", whose client goes away after {cancel:.6f} s"
            return f"request {injection.request} arrives, with {injection.timeout_s:.6f} s{fate}{gone}"
        case Start():
            return f"worker {injection.worker} joins for stage {injection.stage}"
        case Strike():
            return f"{injection.fault} strikes {injection.worker}"


def _command(verb: str, case: Case, events: int) -> str:
    return f"python -m simulation {verb} --scenario {case.scenario.name} --seed {case.seed} --events {events}"
