"""Evaluation of a campaign: quantiles, attribution, excused refusals, the verdict and its JSON."""

import json
import math

import pytest

from multiworld_serving.testing.chaos.campaign import CampaignResult, Injection, Plan
from multiworld_serving.testing.chaos.faults import BY_NAME
from multiworld_serving.testing.chaos.observer import Outage
from multiworld_serving.testing.chaos.report import summarize, to_json
from multiworld_serving.testing.chaos.resources import SHORTEST_S, Series, series
from multiworld_serving.testing.chaos.system.processes import Resources
from multiworld_serving.testing.load.clients import Load, Sample
from multiworld_serving.testing.load.statistics import Spread, quantile

RIGHT = 200


def found(*samples: Sample, **more: object) -> CampaignResult:
    """A campaign of 60 s from 0 on: a kill at 10, recovered at 12, and a freeze at 30, recovered at 35."""
    findings = CampaignResult(Plan([], [BY_NAME["kill"], BY_NAME["freeze"]], grace_s=15.0), started_s=0.0, ended_s=60.0)
    findings.injections = [
        Injection("kill", ("s0.r0",), 10.0, 12.0, ("exit",), 0.1, 0.2, 1, 2.0),
        Injection("freeze", ("s1.r0",), 30.0, 35.0, ("hang",), 1.0, None, 0, 5.0),
    ]
    findings.load = Load(list(samples) or [Sample(1.0, 0.1, RIGHT)])
    for name, value in more.items():
        setattr(findings, name, value)
    return findings


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_quantile_is_the_value_that_the_share_does_not_exceed(share: float, value: int) -> None:
    assert quantile(range(1, 101), share) == value


def test_quantile_of_nothing_is_nan() -> None:
    assert math.isnan(Spread.of([]).median)
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(3, 2.0, 3.0, 3.0)


def test_verdict_is_empty_without_failures() -> None:
    report = summarize(found())
    assert report.verdict == []
    assert [(row.fault, row.times, row.failed) for row in report.rows] == [("kill", 1, 0), ("freeze", 1, 0)]
    assert report.total.detect == Spread(2, 0.1, 1.0, 1.0)


def test_failure_is_attributed_to_the_preceding_fault() -> None:
    report = summarize(found(Sample(9.0, 5.0, 500, "oh"), Sample(31.0, 1.0, 0, "hung up"), Sample(1.0, 1.0, 500)))
    assert [row.failed for row in report.rows] == [1, 1]
    assert report.total.failed == 3
    assert report.verdict[0].startswith("3 requests failed")


def test_wrong_answer_is_a_failure() -> None:
    report = summarize(found(Sample(11.0, 0.1, RIGHT, "wrong answer: class 3")))
    assert report.total.failed == 1
    assert "wrong answer" in report.verdict[0]


def test_overload_refusal_is_not_a_failure() -> None:
    report = summarize(found(Sample(11.0, 0.1, 429, "later")))
    assert (report.total.failed, report.refused, report.verdict) == (0, 1, [])


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
    report = summarize(found(sample, outages=[Outage(1, 10.0, until_s)]))
    assert (report.total.excused, report.total.failed) == ((1, 0) if excused else (0, 1))
    assert bool(report.verdict) != excused


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"duplicates": 2}, "2 requests were answered twice"),
        ({"aborted": "not complete"}, "ended early: not complete"),
        ({"load": Load()}, "no request was sent"),
        ({"injections": []}, "not injected before the end: freeze, kill"),
        ({"injections": [], "skipped": {"freeze": "no root"}}, "not injected before the end: kill"),
        ({"resources": [Series("leader", "threads", 1, 9, 9, False)]}, "resource usage grows: leader: threads"),
        ({"injections": [Injection("kill", (), 1, 2, unexpected=("odd",))], "skipped": {"freeze": ""}}, "kill: odd"),
    ],
)
def test_verdict_names_what_went_wrong(more: dict[str, object], says: str) -> None:
    assert summarize(found(**more)).verdict == [says]


def test_latency_is_counted_before_during_and_after_each_fault() -> None:
    samples = [Sample(1.0, 0.1, RIGHT), Sample(9.9, 2.0, RIGHT), Sample(11.0, 0.3, RIGHT), Sample(20.0, 0.2, RIGHT)]
    kill = summarize(found(*samples)).rows[0]
    assert kill.before == Spread.of([0.1])
    assert kill.during == Spread.of([2.0, 0.3])
    assert kill.after == Spread.of([0.2])


def test_json_is_complete_and_contains_no_nan() -> None:
    findings = found(Sample(11.0, 0.1, 500, "oh"))
    document = json.loads(json.dumps(to_json(findings, summarize(findings)), allow_nan=False))
    assert document["failed"] == 1
    assert document["failures"][0]["error"] == "oh"
    assert document["faults"][1]["reroute"] == {"count": 0, "median": None, "p99": None, "max": None}
    assert [injection["targets"] for injection in document["injections"]] == [["s0.r0"], ["s1.r0"]]


def watched(seconds: float, threads: dict[int, int]) -> list[Series]:
    """Thread counts in each quarter of the time."""
    snapshots = [(seconds * n / 100, Resources(threads[min(3, n // 25)], 10, 100.0)) for n in range(101)]
    return [each for each in series("leader", snapshots) if each.figure == "threads"]


@pytest.mark.parametrize(
    ("quarters", "flat"),
    [((20, 20, 20, 20), True), ((10, 20, 21, 22), True), ((20, 20, 20, 23), False), ((20, 30, 20, 15), True)],
    ids=["still", "warms up", "grows", "shrinks"],
)
def test_resource_is_stable_unless_the_last_quarter_exceeds_the_second(quarters: tuple[int, ...], flat: bool) -> None:
    (threads,) = watched(SHORTEST_S, dict(enumerate(quarters)))
    assert threads.flat is flat
    assert (threads.first, threads.last, threads.last_quarter) == (quarters[0], quarters[3], quarters[3])


def test_resource_is_not_judged_after_a_short_run() -> None:
    (threads,) = watched(SHORTEST_S / 2, dict.fromkeys(range(4), 1))
    assert threads.flat is None


@pytest.mark.parametrize(
    ("sample", "failed", "excused"),
    [
        (Sample(41.0, 0.1, 0, "refused"), 0, 1),
        (Sample(41.0, 0.1, 503, "draining"), 0, 1),
        (Sample(41.0, 0.1, 500, "oh"), 1, 0),
        (Sample(41.0, 0.1, RIGHT, "wrong answer"), 1, 0),
        (Sample(51.0, 0.1, 0, "refused"), 1, 0),
    ],
)
def test_unanswered_requests_during_leader_downtime_are_not_attributed(
    sample: Sample, failed: int, excused: int
) -> None:
    findings = found(sample)
    findings.injections.append(Injection("leader-kill", (), 40.0, 50.0, excused=(0, 503)))
    report = summarize(findings)
    assert (report.total.failed, report.total.excused) == (failed, excused)


def test_frontend_fault_excuses_only_lost_connections() -> None:
    findings = found(Sample(41.0, 0.1, 0, "reset"), Sample(41.0, 0.1, 503, "not ready"))
    findings.injections.append(Injection("frontend-kill", ("frontend-0",), 40.0, 50.0, excused=(0,)))
    report = summarize(findings)
    assert (report.total.failed, report.total.excused) == (1, 1)


def test_leader_fault_excuses_nothing() -> None:
    findings = found(Sample(41.0, 0.1, 0, "reset"), Sample(41.0, 0.1, 503, "not ready"))
    findings.injections.append(Injection("leader-kill", ("leader-0",), 40.0, 50.0))
    assert summarize(findings).total.failed == 2
