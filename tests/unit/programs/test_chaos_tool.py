"""What the fault injection counts as lost, wrong or possible."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from multiworld_serving.common.config import UserError
from multiworld_serving.testing.chaos.campaign import CampaignResult, Injection, Plan
from multiworld_serving.testing.chaos.faults import ALL_FAULTS, BY_NAME
from multiworld_serving.testing.chaos.observer import Outage, Replica, Snapshot, outages
from multiworld_serving.testing.chaos.report import summarize
from multiworld_serving.testing.chaos.schedule import chosen_faults, missing_targets_reason
from multiworld_serving.testing.chaos.system.network import drop_rules
from multiworld_serving.testing.chaos.system.processes import Connection, Process, resources
from multiworld_serving.testing.load.clients import Load, ReferenceRequest, Sample, count_indistinguishable

QUESTION = ReferenceRequest(b"", expected={1: 0.5, 2: 0.3, 3: 0.1})


def says(**probabilities: float) -> dict[str, object]:
    return {"predictions": [{"class_id": int(name[1:]), "probability": p} for name, p in probabilities.items()]}


def replica(state: str, slot: int = 0, generation: int = 1, stage: int = 0) -> Replica:
    return Replica(stage, slot, state, generation, f"local-{slot}", None, None)


def at(at_s: float, *replicas: Replica) -> Snapshot:
    return Snapshot(at_s, {each.key: each for each in replicas})


def campaign(*samples: Sample, **more: object) -> CampaignResult:
    """A campaign of 60 s from 0 on: a kill at 10, recovered at 12, and a freeze at 30, recovered at 35."""
    result = CampaignResult(Plan([], [BY_NAME["kill"], BY_NAME["freeze"]], grace_s=15.0), started_s=0.0, ended_s=60.0)
    result.injections = [
        Injection("kill", ("s0.r0",), 10.0, 12.0, ("exit",), 0.1, 2.0),
        Injection("freeze", ("s1.r0",), 30.0, 35.0, ("hang",), 1.0, 5.0),
    ]
    result.load = Load(list(samples) or [Sample(1.0, 0.1, 200)])
    for name, value in more.items():
        setattr(result, name, value)
    return result


@pytest.mark.parametrize("answer", [says(c1=0.5001, c2=0.2999, c3=0.1), says(c1=0.5, c2=0.3, c4=0.1)])
def test_answer_is_right_when_it_differs_by_rounding(answer: dict[str, object]) -> None:
    assert QUESTION.find_mismatch(answer) == ""


@pytest.mark.parametrize("answer", [says(c1=0.4, c2=0.4, c3=0.1), says(c7=0.5, c8=0.3, c9=0.1), says()])
def test_answer_is_wrong_when_it_belongs_to_another_image(answer: dict[str, object]) -> None:
    assert QUESTION.find_mismatch(answer).startswith("wrong answer")


def test_images_with_equal_answers_are_reported() -> None:
    assert count_indistinguishable([QUESTION, QUESTION, ReferenceRequest(b"", expected={1: 0.9})]) == 1


def test_outage_lasts_while_no_replica_of_the_stage_is_ready() -> None:
    up, down = replica("ready"), replica("broken")
    other, other_down = replica("ready", slot=1), replica("broken", slot=1)
    pairs = [(up, other), (down, other), (down, other_down), (up, other_down), (down, other_down)]
    snapshots = [at(at_s, *pair) for at_s, pair in zip((0, 1, 2, 5, 6), pairs, strict=True)]
    assert outages(snapshots) == [Outage(0, 2, 5), Outage(0, 6, 6)]


def test_failure_is_attributed_to_the_preceding_fault() -> None:
    report = summarize(campaign(Sample(9.0, 5.0, 500, "oh"), Sample(31.0, 1.0, 0, "hung up"), Sample(1.0, 1.0, 500)))
    assert [(row.fault, row.failed) for row in report.rows] == [("kill", 1), ("freeze", 1)]
    assert report.total.failed == 3
    assert report.verdict[0].startswith("3 requests failed")


@pytest.mark.parametrize(
    ("sample", "until_s", "excused"),
    [
        (Sample(12.0, 16.0, 503), 30.0, True),
        (Sample(12.0, 16.0, 503), 20.0, False),  # the stage recovered within the grace
        (Sample(40.0, 1.0, 503), 30.0, False),  # long after it
        (Sample(12.0, 16.0, 504), 30.0, False),  # refused for another reason
    ],
    ids=["longer than the grace", "shorter than the grace", "after the outage", "another status"],
)
def test_refusal_is_excused_only_when_a_stage_was_empty_beyond_the_grace(
    sample: Sample, until_s: float, excused: bool
) -> None:
    report = summarize(campaign(sample, outages=[Outage(1, 10.0, until_s)]))
    assert (report.total.excused, report.total.failed) == ((1, 0) if excused else (0, 1))
    assert bool(report.verdict) != excused


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, []),
        ({"load": Load([Sample(11.0, 0.1, 429, "later")])}, []),
        ({"duplicates": 2}, ["2 requests were answered twice"]),
        ({"aborted": "not complete"}, ["ended early: not complete"]),
        ({"load": Load()}, ["no request was sent"]),
        ({"injections": [], "skipped": {"freeze": "no root"}}, ["not injected before the end: kill"]),
        ({"injections": [Injection("kill", (), 1, 2, unexpected=("odd",))], "skipped": {"freeze": ""}}, ["kill: odd"]),
    ],
)
def test_verdict_names_what_went_wrong(more: dict[str, object], expected: list[str]) -> None:
    assert summarize(campaign(**more)).verdict == expected


def test_named_faults_are_chosen_in_the_order_of_the_catalogue() -> None:
    assert [fault.name for fault in chosen_faults("oom,kill", ALL_FAULTS)] == ["kill", "oom"]


@pytest.mark.parametrize("names", ["kill,explode", "oom", ",", ""])
def test_faults_are_refused_when_a_name_is_unknown(names: str) -> None:
    with pytest.raises(UserError, match="--faults"):
        chosen_faults(names)


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
    pipeline = at(0.0, *(replica("ready", slot, stage=stage) for stage in range(stages) for slot in range(replicas)))
    assert (missing_targets_reason(BY_NAME[name], pipeline) == "") == possible


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def test_ended_process_is_not_signaled(sleeper: "subprocess.Popen[bytes]") -> None:
    with Process(sleeper.pid) as process:
        sleeper.kill()
        sleeper.wait()
        with process.stopped():
            pass
        with pytest.raises(OSError, match=r"."):
            resources(sleeper.pid)


def test_memory_limit_of_a_process_is_restored(sleeper: "subprocess.Popen[bytes]") -> None:
    limits = Path(f"/proc/{sleeper.pid}/limits")
    before = limits.read_text()
    with Process(sleeper.pid) as process, process.without_memory():
        assert limits.read_text() != before
    assert limits.read_text() == before


def test_rules_drop_packets_in_the_given_directions_including_new_connections() -> None:
    connection = Connection("10.0.0.1", 4000, "10.0.0.2", 8001)
    out = ["-s", "10.0.0.1", "--sport", "4000", "-d", "10.0.0.2", "--dport", "8001"]
    back = ["-s", "10.0.0.2", "--sport", "8001", "-d", "10.0.0.1", "--dport", "4000"]
    for direction, goes, comes in (("both", True, True), ("from", True, False), ("to", False, True)):
        rules = drop_rules([connection], direction)  # type: ignore[arg-type]
        parts = [rule[2:-2] for rule in rules]
        assert (out in parts, back in parts) == (goes, comes)
        assert any("--syn" in rule or "SYN,ACK" in rule for rule in rules)
