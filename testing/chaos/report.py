"""Summarizes a campaign: excused failures, statistics per fault, and the verdict. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from multiworld_serving.testing.chaos.campaign import CampaignResult
from multiworld_serving.testing.chaos.faults import FAULTS
from multiworld_serving.testing.chaos.journal import Injection
from multiworld_serving.testing.load.clients import Sample
from multiworld_serving.testing.load.measurement import Spread


@dataclass(frozen=True, slots=True)
class Row:
    """Statistics of one fault. Times in seconds; None if there are no values.

    Attributes:
        failed: requests that failed and are not excused.
        excused: requests that were refused because a stage had no replica for longer than the recovery grace, or that the fault excuses.
        latency: of requests that were in flight between fault and recovery.
    """

    fault: str
    times: int
    failed: int
    excused: int
    duplicates: int
    detect: Spread | None
    recover: Spread | None
    latency: Spread | None


@dataclass(frozen=True, slots=True)
class Report:
    """The summary of a campaign.

    Attributes:
        wrong: requests with a wrong answer. They count as failed, too.
        longest_s: of all requests.
        without_faults: latency of the requests that were in flight during no fault.
        verdict: what went wrong; empty if nothing did.
    """

    rows: list[Row]
    total: Row
    requests: int
    refused: int
    wrong: int
    longest_s: float
    without_faults: Spread | None
    verdict: list[str]


def summarize(result: CampaignResult) -> Report:
    """Compute the report."""
    failed: list[Sample] = []
    forgiven: list[Sample] = []
    for sample in result.load.failed:
        (forgiven if _is_excused(sample, result) else failed).append(sample)
    kinds = dict.fromkeys(injection.fault for injection in result.injections)
    affected = _affected(result)
    in_flight = {id(sample) for samples in affected for sample in samples}
    return Report(
        rows=[_row(kind, result, failed, forgiven, affected) for kind in kinds],
        total=_row(None, result, failed, forgiven, affected),
        wrong=sum(sample.status == 200 and bool(sample.error) for sample in result.load.samples),
        longest_s=max((sample.took_s for sample in result.load.samples), default=0.0),
        without_faults=Spread.of([each.took_s for each in result.load.samples if id(each) not in in_flight]),
        requests=len(result.load.samples),
        refused=sum(sample.refused for sample in result.load.samples),
        verdict=_verdict(result, failed),
    )


def _affected(result: CampaignResult) -> list[list[Sample]]:
    """For each injection, the requests that were in flight between fault and recovery."""
    samples = sorted(result.load.samples, key=lambda sample: sample.sent_s)
    sent_s, longest_s = [sample.sent_s for sample in samples], max((sample.took_s for sample in samples), default=0.0)
    return [
        [
            sample
            for sample in samples[bisect_left(sent_s, each.at_s - longest_s) : bisect_right(sent_s, each.ended_s)]
            if sample.done_s >= each.at_s
        ]
        for each in result.injections
    ]


def _is_excused(sample: Sample, result: CampaignResult) -> bool:
    return any(_excuses(injection, result.plan.grace_s, sample) for injection in result.injections)


def _excuses(injection: Injection, grace_s: float, sample: Sample) -> bool:
    """Whether the fault excuses that the request failed. It excuses a 503 if a stage had no replica for longer than the recovery grace."""
    is_outage = FAULTS[injection.fault].scope in ("stage", "all") and injection.ended_s - injection.at_s >= grace_s
    statuses = {*injection.excused, *([503] if is_outage else [])}
    return interrupted(sample, statuses, injection.at_s, injection.ended_s)


def interrupted(sample: Sample, statuses: Collection[int], since_s: float, until_s: float) -> bool:
    """Whether the request got one of these statuses while a process was down in this interval. Other failures are not excused."""
    return sample.status in statuses and sample.done_s >= since_s and sample.sent_s <= until_s


def to_json(result: CampaignResult, report: Report) -> dict[str, Any]:
    """Return the full result as JSON values."""
    found = asdict(report)
    return {
        "seed": result.plan.seed,
        "started_unix_s": result.started_s,
        "duration_s": result.ended_s - result.started_s,
        **{name: found[name] for name in ("requests", "refused", "wrong", "longest_s")},
        **{name: found["total"][name] for name in ("failed", "excused", "duplicates")},
        "latency_without_faults": found["without_faults"],
        "latency_during_faults": found["total"]["latency"],
        "faults": found["rows"],
        "injections": [asdict(injection) for injection in result.injections],
        "failures": [asdict(sample) for sample in result.load.failed[:1000]],
        "resources": {name: [asdict(each) for each in pair] for name, pair in result.resources.items()},
        "skipped": result.skipped,
        "warnings": result.warnings,
        "verdict": report.verdict or "ok",
    }


def _row(
    kind: str | None,
    result: CampaignResult,
    failed: Sequence[Sample],
    forgiven: Sequence[Sample],
    affected: Sequence[Sequence[Sample]],
) -> Row:
    """Return the statistics of one fault, or of all if None."""
    injections = [injection for injection in result.injections if kind in (None, injection.fault)]
    of_kind = [
        each for injection, each in zip(result.injections, affected, strict=True) if kind in (None, injection.fault)
    ]
    return Row(
        fault=kind or "all",
        times=len(injections),
        failed=_count_following(failed, result, kind),
        excused=_count_following(forgiven, result, kind),
        duplicates=result.duplicates if kind is None else sum(injection.duplicates for injection in injections),
        detect=Spread.of([each.detected_s for each in injections if each.detected_s is not None]),
        recover=Spread.of([injection.recovered_s for injection in injections]),
        latency=Spread.of([sample.took_s for each in of_kind for sample in each]),
    )


def _count_following(samples: Sequence[Sample], result: CampaignResult, kind: str | None) -> int:
    """Count samples that ended between a fault of this kind and the next fault; all samples if None."""
    if kind is None:
        return len(samples)
    starts = [injection.at_s for injection in result.injections]
    last = [bisect_right(starts, sample.done_s) - 1 for sample in samples]
    return sum(n >= 0 and result.injections[n].fault == kind for n in last)


def _verdict(result: CampaignResult, failed: Sequence[Sample]) -> list[str]:
    wanted = {fault.name for fault in result.plan.faults} - result.skipped.keys()
    missing = sorted(wanted - {injection.fault for injection in result.injections})
    checks = [
        (result.aborted, f"ended early: {result.aborted}"),
        (not result.load.samples, "no request was sent"),
        (failed, f"{len(failed)} requests failed and are not excused: {_examples(failed)}"),
        (result.duplicates, f"{result.duplicates} requests were answered twice"),
        (missing, f"not injected before the end: {', '.join(missing)}"),
        *((True, f"{injection.fault}: {item}") for injection in result.injections for item in injection.unexpected),
    ]
    return [text for wrong, text in checks if wrong]


def _examples(failed: Sequence[Sample]) -> str:
    kinds = dict.fromkeys(f"{sample.status} {sample.error[:100]}" for sample in failed)
    return "; ".join(list(kinds)[:3])
