"""The schedule of a campaign: durations, selection and order of faults, and their targets."""

from collections import Counter
from itertools import islice

import pytest

from multiworld_serving.common.config import UserError
from multiworld_serving.testing.chaos.faults import ALL_FAULTS, BY_NAME, PROCESS_FAULTS
from multiworld_serving.testing.chaos.observer import Replica, Snapshot
from multiworld_serving.testing.chaos.schedule import (
    FaultTargets,
    chosen_faults,
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


def test_all_faults_but_the_end_of_the_service_are_selected_by_default() -> None:
    assert {fault.name for fault in PROCESS_FAULTS} - {fault.name for fault in chosen_faults(None)} == {
        "supervisor-kill"
    }
    assert [fault.name for fault in chosen_faults("supervisor-kill")] == ["supervisor-kill"]


def test_named_faults_are_chosen_in_the_order_of_the_catalogue() -> None:
    assert [fault.name for fault in chosen_faults("freeze, kill")] == ["kill", "freeze"]


@pytest.mark.parametrize("names", ["kill,explode", ",", ""])
def test_faults_are_refused_when_a_name_is_unknown(names: str) -> None:
    with pytest.raises(UserError, match="--faults"):
        chosen_faults(names)


def test_names_of_faults_are_unique() -> None:
    assert len({fault.name for fault in ALL_FAULTS}) == len(ALL_FAULTS)


def test_container_faults_are_known_only_for_containers() -> None:
    assert {fault.name for fault in chosen_faults(None, ALL_FAULTS)} >= {"oom", "kill", "leader-restart"}
    assert [fault.name for fault in chosen_faults("oom,kill", ALL_FAULTS)] == ["kill", "oom"]
    with pytest.raises(UserError, match="there is no such fault"):
        chosen_faults("oom")


def test_order_has_every_fault_once_per_round_and_depends_only_on_the_seed() -> None:
    rounds = [fault.name for fault in islice(order(PROCESS_FAULTS, 7), 3 * len(PROCESS_FAULTS))]
    assert set(Counter(rounds).values()) == {3}
    assert set(rounds[: len(PROCESS_FAULTS)]) == {fault.name for fault in PROCESS_FAULTS}
    assert rounds == [fault.name for fault in islice(order(PROCESS_FAULTS, 7), 3 * len(PROCESS_FAULTS))]
    assert rounds != [fault.name for fault in islice(order(PROCESS_FAULTS, 8), 3 * len(PROCESS_FAULTS))]


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
    assert (missing_targets_reason(BY_NAME[name], pipeline(stages, replicas)) == "") == possible


def test_two_targets_are_in_different_stages() -> None:
    pairs = groups("two", pipeline(3, 2))
    assert len(pairs) == 24
    assert all(one.stage != other.stage for one, other in pairs)


def test_protected_workers_are_never_targets() -> None:
    now, protected = pipeline(2, 2), frozenset({"local-0"})
    for scope in ("one", "two", "stage", "all"):
        assert all(target.worker != "local-0" for group in groups(scope, now, protected) for target in group)
    assert groups("all", now, protected) == []
    assert "protected" in missing_targets_reason(BY_NAME["all"], now, protected)


def test_targets_are_chosen_equally_often_and_depend_on_the_seed() -> None:
    now = pipeline(2, 2)
    chosen = [[FaultTargets(seed).choose(BY_NAME["kill"], now) for _ in range(1)] for seed in (1, 1)]
    assert chosen[0] == chosen[1]
    targets = FaultTargets(3)
    times = Counter(target.key for _ in range(8) for target in targets.choose(BY_NAME["kill"], now))
    assert set(times.values()) == {2}


def test_client_faults_have_no_targets() -> None:
    assert FaultTargets(0).choose(BY_NAME["deadline"], pipeline(2, 2)) == ()
