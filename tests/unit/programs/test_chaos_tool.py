"""What the fault injection counts as lost, wrong or possible."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from multiworld_serving.testing.chaos.campaign import CampaignResult, Injection, Plan
from multiworld_serving.testing.chaos.faults import BY_NAME
from multiworld_serving.testing.chaos.observer import Outage, Replica, Snapshot
from multiworld_serving.testing.chaos.report import summarize
from multiworld_serving.testing.load.clients import Load, ReferenceRequest, Sample

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


@pytest.mark.parametrize("answer", [says(c1=0.4, c2=0.4, c3=0.1), says(c7=0.5, c8=0.3, c9=0.1), says()])
def test_answer_is_wrong_when_it_belongs_to_another_image(answer: dict[str, object]) -> None:
    assert QUESTION.find_mismatch(answer).startswith("wrong answer")


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


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()
