"""From a failing run of thousands of injections to the few that matter.

Delta debugging (Zeller and Hildebrandt, 2002) of the recorded injections: leave parts out, play the rest with the same
seed, keep what still fails; then make what is left simpler, and begin anew. Because every worker has random numbers of
its own, and workers answer what they are really sent, whatever is left is a legal run: if it fails, it is a finding.
Deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from simulation.injections import Arrival, Injection, Recording, Start, Strike
from simulation.verdict import Case, Failure

_LONGEST_GAP_S = 0.01
_SHORT_S = 0.01


class Shrinker:
    """Shrinks one failure of one case.

    With fewer workers or less time a healthy request may rightly be refused. So a failure of outcome keeps all workers,
    and no other failure turns into one.

    Args:
        max_runs: so many candidates are played at most.
        same_place: take only what fails at the same line. Otherwise any failure will do, which is often smaller, and may
            turn out to be another bug; the seed still leads back to the first one.
    """

    def __init__(self, case: Case, failure: Failure, *, max_runs: int = 2_000, same_place: bool = False) -> None:
        self._case = case
        self._best = failure
        self._of_outcome = failure.of_outcome
        self._place = failure.place if same_place else None
        self._runs_left = max_runs

    def shrink(self) -> Failure:
        """The smallest failure found, with its trace."""
        before = None
        while before != self._best.recording.injections and self._runs_left > 0:
            before = self._best.recording.injections
            self._remove_chunks()
            if not self._of_outcome:
                self._simplify()
        smallest = self._case.play(self._best.recording, traced=True)
        assert smallest is not None, "the same recording did not fail again: something is not deterministic"
        return smallest

    def _remove_chunks(self) -> None:
        """Chunks of half of it, a quarter and so on, the last ones first."""
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
        """One injection after the other, each by all ways that there are."""
        index = 0
        while index < len(self._best.recording.injections):
            for simpler in _simpler(self._best.recording.injections, index):
                self._try(simpler)
            index += 1

    def _try(self, injections: tuple[Injection, ...]) -> bool:
        """Take this instead, if it fails."""
        if self._runs_left <= 0 or injections == self._best.recording.injections:
            return False
        if self._of_outcome and _starts(injections) != _starts(self._best.recording.injections):
            return False
        self._runs_left -= 1
        failure = self._case.play(Recording(injections, self._best.recording.ended_s))
        if failure is None or failure.of_outcome != self._of_outcome or self._place not in (None, failure.place):
            return False
        # What comes after the failure has not been played: its recording does without.
        self._best = failure
        return True


def _simpler(injections: tuple[Injection, ...], index: int) -> Iterator[tuple[Injection, ...]]:
    """The same with one thing simpler: less time before this injection, a client that stays, goes at once or has little time,
    a healthy request, a plain kill."""
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
            if this.fate != "answer":
                yield (*before, replace(this, fate="answer"), *after)
        case Strike() if this.fault != "kill":
            yield (*before, replace(this, fault="kill"), *after)


def _starts(injections: tuple[Injection, ...]) -> list[Start]:
    return [each for each in injections if isinstance(each, Start)]
