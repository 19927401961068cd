"""The schedule of a campaign: durations, selection and order of faults, and their targets."""

from collections import Counter
from itertools import islice

import pytest

from multiworld_serving.common.config import UserError
from multiworld_serving.testing.chaos.container_faults import ALL_FAULTS
from multiworld_serving.testing.chaos.faults import CATALOGUE, fault
from multiworld_serving.testing.chaos.observer import Replica, Snapshot
from multiworld_serving.testing.chaos.schedule import (
    FaultTargets,
    chosen_faults,
    duration_s,
    groups,
    missing_targets_reason,
    order,
)


def pipeline(stages: int, replicas: int) -> Snapshot:
    every = [
        Replica(s, r, "ready", 1, f"local-{s * replicas + r}", None, None)
        for s in range(stages)
        for r in range(replicas)
    ]
    return Snapshot(0.0, {replica.key: replica for replica in every})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("1.5m", 90.0), ("30min", 1800.0), ("2h", 7200.0), ("500ms", 0.5), ("0s", 0.0)],
)
def test_duration_is_parsed_with_its_unit(text: str, seconds: float) -> None:
    assert duration_s(text, "--every") == seconds


@pytest.mark.parametrize("text", ["", "soon", "-5s", "5 weeks", "1e3", "nan"])
def test_invalid_duration_is_refused_by_its_option(text: str) -> None:
    with pytest.raises(UserError, match=r"^--every .*: must be a time"):
        duration_s(text, "--every")


def test_all_faults_are_selected_by_default() -> None:
    assert chosen_faults(None) == list(CATALOGUE)


def test_named_faults_are_selected() -> None:
    assert [fault.name for fault in chosen_faults("freeze, kill")] == ["kill", "freeze"]


@pytest.mark.parametrize("names", ["kill,explode", ",", ""])
def test_unknown_faults_are_refused(names: str) -> None:
    with pytest.raises(UserError, match="--faults"):
        chosen_faults(names)


def test_fault_names_are_unique() -> None:
    assert len({fault.name for fault in ALL_FAULTS}) == len(ALL_FAULTS)


def test_container_faults_are_known_when_there_are_containers() -> None:
    assert chosen_faults(None, ALL_FAULTS) == list(ALL_FAULTS)
    assert [fault.name for fault in chosen_faults("oom,kill", ALL_FAULTS)] == ["oom", "kill"]
    with pytest.raises(UserError, match="there is no such fault"):
        chosen_faults("oom")


def test_order_has_every_fault_once_per_round_and_depends_only_on_the_seed() -> None:
    rounds = [fault.name for fault in islice(order(CATALOGUE, 7), 3 * len(CATALOGUE))]
    assert set(Counter(rounds).values()) == {3}
    assert set(rounds[: len(CATALOGUE)]) == {fault.name for fault in CATALOGUE}
    assert rounds == [fault.name for fault in islice(order(CATALOGUE, 7), 3 * len(CATALOGUE))]
    assert rounds != [fault.name for fault in islice(order(CATALOGUE, 8), 3 * len(CATALOGUE))]


@pytest.mark.parametrize(
    ("name", "stages", "replicas", "possible"),
    [
        ("kill", 2, 2, True),
        ("kill", 2, 1, False),
        ("two", 2, 2, True),
        ("two", 1, 2, False),
        ("stage", 1, 1, True),
        ("all", 1, 1, True),
        ("deadline", 1, 1, True),
    ],
)
def test_fault_is_impossible_when_the_pipeline_is_too_small(
    name: str, stages: int, replicas: int, possible: bool
) -> None:
    assert (missing_targets_reason(fault(name), pipeline(stages, replicas)) == "") == possible


def test_two_targets_are_in_different_stages() -> None:
    pairs = groups("two", pipeline(3, 2))
    assert len(pairs) == 24
    assert all(one.stage != other.stage for one, other in pairs)


def test_protected_workers_are_never_targets() -> None:
    now, protected = pipeline(2, 2), frozenset({"local-0"})
    for scope in ("one", "two", "stage", "all"):
        assert all(target.worker != "local-0" for group in groups(scope, now, protected) for target in group)
    assert groups("all", now, protected) == []
    assert "protected" in missing_targets_reason(fault("all"), now, protected)


def test_targets_are_used_equally_often_and_depend_only_on_the_seed() -> None:
    now = pipeline(2, 2)
    chosen = [[FaultTargets(seed).choose(fault("kill"), now) for _ in range(1)] for seed in (1, 1)]
    assert chosen[0] == chosen[1]
    targets = FaultTargets(3)
    hurt = Counter(target.key for _ in range(8) for target in targets.choose(fault("kill"), now))
    assert set(hurt.values()) == {2}


def test_client_side_faults_have_no_targets() -> None:
    assert FaultTargets(0).choose(fault("deadline"), pipeline(2, 2)) == ()
