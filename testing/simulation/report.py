"""Text report of a failure: the broken invariant, the commands that reproduce it, and the injections it needs."""

from __future__ import annotations

from collections.abc import Iterator

from multiworld_serving.testing.simulation.case import Case, Failure
from multiworld_serving.testing.simulation.injections import Arrival, FaultInjected, Injection, Start


def replay_command(case: Case, events: int) -> str:
    """The command that repeats this run, from the root of the repository."""
    return _command("replay", case, events)


def shrink_command(case: Case, events: int) -> str:
    """The command that repeats this run and shrinks it."""
    return _command("shrink", case, events)


def describe(failure: Failure) -> str:
    """Describe a failure: its injections, then (if traced) every event with the resulting actions, in order of time."""
    return "\n".join(_lines(failure))


def _lines(failure: Failure) -> Iterator[str]:
    yield str(failure)
    yield f"{len(failure.recording.injections)} injections:"
    for injection in failure.recording.injections:
        yield f"  t={injection.at_s:.6f}  {_describe(injection)}"
    if failure.trace is not None:
        yield f"{len(failure.trace)} events, each with the actions of the scheduler:"
        for time_s, event, actions in failure.trace:
            yield f"  t={time_s:.6f}  {event}"
            yield from (f"      -> {action}" for action in actions)


def _describe(injection: Injection) -> str:
    match injection:
        case Arrival():
            compute_outcome = (
                "" if injection.compute_outcome == "answer" else f", compute outcome {injection.compute_outcome}"
            )
            cancel = injection.cancel_after_s
            gone = "" if cancel is None else f", cancelled after {cancel:.6f} s"
            return f"request {injection.request} arrives, timeout {injection.timeout_s:.6f} s{compute_outcome}{gone}"
        case Start():
            return f"worker {injection.worker} joins stage {injection.stage}"
        case FaultInjected():
            return f"fault {injection.fault} at {injection.worker}"


def _command(verb: str, case: Case, events: int) -> str:
    return f"python -m multiworld_serving.testing.simulation {verb} --scenario {case.scenario.name} --seed {case.seed} --events {events}"
