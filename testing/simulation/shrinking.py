"""Reduces a failing run of thousands of injections to the few that it needs.

Delta debugging (Zeller and Hildebrandt, 2002) of the recorded injections: remove chunks, replay the rest with the same
seed, keep what still fails; then simplify the remaining injections, and repeat. Every worker has its own random stream
and reacts only to what it is sent, so every subset of the injections is a valid run. Deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from multiworld_serving.testing.simulation.case import Case, Failure
from multiworld_serving.testing.simulation.workload import Arrival, FaultInjected, Injection, Recording, Start

_LONGEST_GAP_S = 0.01
_SHORT_S = 0.01


class Shrinker:
    """Shrinks one failure of one case.

    With fewer workers or shorter deadlines the scheduler may correctly refuse a healthy request. Therefore a failure of
    the outcome keeps all workers, and no other failure is replaced by one.

    Args:
        max_runs: maximum number of candidates to replay.
        same_location: accept only failures at the same source line. Otherwise any failure is accepted; the result is
            often smaller and may be a different bug. The seed still reproduces the original failure.
    """

    def __init__(self, case: Case, failure: Failure, *, max_runs: int = 2_000, same_location: bool = False) -> None:
        self._case = case
        self._best = failure
        self._is_outcome_failure = failure.is_outcome_failure
        self._location = failure.location if same_location else None
        self._runs_left = max_runs

    def shrink(self) -> Failure:
        """Return the smallest failure found, with its trace."""
        before = None
        while before != self._best.recording.injections and self._runs_left > 0:
            before = self._best.recording.injections
            self._remove_chunks()
            if not self._is_outcome_failure:
                self._simplify()
        smallest = self._case.play(self._best.recording, traced=True)
        assert smallest is not None, "replaying the same recording did not fail: the simulation is not deterministic"
        return smallest

    def _remove_chunks(self) -> None:
        """Try to remove chunks of half the injections, a quarter and so on, from the end."""
        chunk = max(1, len(self._best.recording.injections) // 2)
        while True:
            end = len(self._best.recording.injections)
            while end > 0:
                start = max(0, end - chunk)
                injections = self._best.recording.injections
                self._try((*injections[:start], *injections[end:]))
                end = min(start, len(self._best.recording.injections))
            if chunk == 1:
                return
            chunk = max(1, min(chunk, len(self._best.recording.injections)) // 2)

    def _simplify(self) -> None:
        """Try every simplification of every injection."""
        index = 0
        while index < len(self._best.recording.injections):
            for simpler in _simpler(self._best.recording.injections, index):
                self._try(simpler)
            index += 1

    def _try(self, injections: tuple[Injection, ...]) -> bool:
        """Replay these injections and keep them if the run fails. Returns whether it did."""
        if self._runs_left <= 0 or injections == self._best.recording.injections:
            return False
        if self._is_outcome_failure and _starts(injections) != _starts(self._best.recording.injections):
            return False
        self._runs_left -= 1
        failure = self._case.play(Recording(injections, self._best.recording.ended_s))
        if (
            failure is None
            or failure.is_outcome_failure != self._is_outcome_failure
            or self._location not in (None, failure.location)
        ):
            return False
        # The new recording ends at the failure: later injections are dropped.
        self._best = failure
        return True


def _simpler(injections: tuple[Injection, ...], index: int) -> Iterator[tuple[Injection, ...]]:
    """Variants in which one injection is simpler: a shorter gap before it, no or immediate cancellation, a short timeout, a
    healthy request, no key, a plain kill."""
    before, this, after = injections[:index], injections[index], injections[index + 1 :]
    wait_s = this.at_s - (before[-1].at_s if before else 0.0)
    if wait_s > _LONGEST_GAP_S:
        earlier_s = wait_s - _LONGEST_GAP_S
        yield (*before, *(replace(each, at_s=each.at_s - earlier_s) for each in injections[index:]))
    match this:
        case Arrival():
            if this.cancel_after_s is not None:
                yield (*before, replace(this, cancel_after_s=None), *after)
                yield (*before, replace(this, cancel_after_s=0.0), *after)
            if this.timeout_s > _SHORT_S:
                yield (*before, replace(this, timeout_s=_SHORT_S), *after)
            if this.compute_outcome != "answer":
                yield (*before, replace(this, compute_outcome="answer"), *after)
            if this.key:
                yield (*before, replace(this, key=""), *after)
        case FaultInjected() if this.fault != "kill":
            yield (*before, replace(this, fault="kill"), *after)


def _starts(injections: tuple[Injection, ...]) -> list[Start]:
    return [each for each in injections if isinstance(each, Start)]
