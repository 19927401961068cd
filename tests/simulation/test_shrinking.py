"""A planted bug is found, reproduced from the printed seed, and shrunk to a minimal case."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from multiworld_serving.server.scheduling.scheduler import Scheduler, SchedulerConfig
from multiworld_serving.testing.simulation.case import Case, Failure
from multiworld_serving.testing.simulation.scenarios import SCENARIOS
from multiworld_serving.testing.simulation.shrinking import Shrinker
from multiworld_serving.testing.simulation.workload import Arrival, FaultInjected, Start
from tests.simulation import planted

_EVENTS = 6_000


@dataclass(frozen=True)
class Bug:
    scheduler: type[Scheduler]
    scenario: str
    injections: int
    """Maximum number of injections after shrinking."""
    faults: int
    """Exact number of faults among them."""


BUGS = (
    Bug(planted.LosesBatches, "everything", 5, 1),
    Bug(planted.MissesDeadlines, "overload-with-short-deadlines", 4, 0),
)


def _found(bug: Bug) -> tuple[Case, Failure]:
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == bug.scenario)
    for seed in range(1, 10):
        case = Case(scenario, seed, bug.scheduler)
        if (failure := case.run(_EVENTS)) is not None:
            return case, failure
    raise AssertionError("not found")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.scheduler.__name__)
def test_planted_bug_is_found_replayed_and_shrunk(bug: Bug) -> None:
    case, failure = _found(bug)
    again = case.run(_EVENTS)
    assert again is not None
    assert (str(again), again.recording) == (str(failure), failure.recording), "the seed did not reproduce it"

    shrunk = Shrinker(case, failure).shrink()
    left = shrunk.recording.injections
    print(f"{len(failure.recording.injections)} injections -> {len(left)}\n{shrunk.describe()}")
    assert len(left) <= bug.injections
    assert sum(isinstance(each, FaultInjected) for each in left) == bug.faults


class GivesUpEarly(Scheduler):
    """Its recovery grace is shorter than the scenario assumes: it violates no invariant, and requests are lost."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(replace(config, recovery_grace_s=0.5))


def test_lost_request_is_found_and_shrunk_without_a_violated_invariant() -> None:
    case, failure = _found(Bug(GivesUpEarly, "stage-lost-for-less-than-the-grace", 0, 0))
    assert failure.is_outcome_failure
    shrunk = Shrinker(case, failure, max_runs=60).shrink()
    kinds = [type(each) for each in shrunk.recording.injections]
    assert "no_replica" in str(shrunk)
    assert (kinds.count(Start), kinds.count(FaultInjected), kinds.count(Arrival)) == (6, 1, 1)
