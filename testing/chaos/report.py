"""Summarizes a campaign: excused failures, statistics per fault, and the verdict. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from multiworld_serving.testing.chaos.campaign import CampaignResult
from multiworld_serving.testing.chaos.faults import FAULTS
from multiworld_serving.testing.chaos.journal import Injection
from multiworld_serving.testing.load.clients import Sample
from multiworld_serving.testing.load.measurement import spread


def summarize(result: CampaignResult) -> dict[str, Any]:
    """Return the report as JSON values: the content of the file of `multiworld chaos --json`.

    Times are in seconds. A distribution is None if there are no values. In each row:
        failed: requests that failed and are not excused.
        excused: requests that were refused because a stage had no replica for longer than the recovery grace, or that the fault excuses.
        latency: of requests that were in flight between fault and recovery.
    """
    samples = result.load.samples
    failed: list[Sample] = []
    forgiven: list[Sample] = []
    for sample in result.load.failed:
        excused = any(_excuses(each, result.plan.recovery_grace_s, sample) for each in result.injections)
        (forgiven if excused else failed).append(sample)
    affected = _affected(result)
    in_flight = {id(sample) for each in affected for sample in each}
    kinds = dict.fromkeys(injection.fault for injection in result.injections)
    total = _row(None, result, failed, forgiven, affected)
    return {
        "seed": result.plan.seed,
        "started_unix_s": result.started_s,
        "duration_s": result.ended_s - result.started_s,
        "requests": len(samples),
        "refused": sum(sample.refused for sample in samples),
        **{name: total[name] for name in ("failed", "excused", "duplicates")},
        "wrong": sum(sample.status == 200 and bool(sample.error) for sample in samples),
        "longest_s": max((sample.took_s for sample in samples), default=0.0),
        "latency_without_faults": spread([each.took_s for each in samples if id(each) not in in_flight]),
        "latency_during_faults": total["latency"],
        "faults": [_row(kind, result, failed, forgiven, affected) for kind in kinds],
        "total": total,
        "injections": [asdict(injection) for injection in result.injections],
        "failures": [asdict(sample) for sample in result.load.failed[:1000]],
        "resources": {name: [asdict(each) for each in pair] for name, pair in result.resources.items()},
        "skipped": result.skipped,
        "warnings": result.warnings,
        "verdict": _verdict(result, failed) or "ok",
    }


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


def _excuses(injection: Injection, grace_s: float, sample: Sample) -> bool:
    """Whether the fault excuses that the request failed. It excuses a 503 if a stage had no replica for longer than the recovery grace."""
    is_outage = FAULTS[injection.fault].scope in ("stage", "all") and injection.ended_s - injection.at_s >= grace_s
    statuses = {*injection.excused, *([503] if is_outage else [])}
    return sample.status in statuses and sample.done_s >= injection.at_s and sample.sent_s <= injection.ended_s


def _row(
    kind: str | None,
    result: CampaignResult,
    failed: Sequence[Sample],
    forgiven: Sequence[Sample],
    affected: Sequence[Sequence[Sample]],
) -> dict[str, Any]:
    """Return the statistics of one fault, or of all if None."""
    injections = [injection for injection in result.injections if kind in (None, injection.fault)]
    of_kind = [
        each for injection, each in zip(result.injections, affected, strict=True) if kind in (None, injection.fault)
    ]
    return {
        "fault": kind or "all",
        "times": len(injections),
        "failed": _count_following(failed, result, kind),
        "excused": _count_following(forgiven, result, kind),
        "duplicates": result.duplicates if kind is None else sum(injection.duplicates for injection in injections),
        "detect": spread([each.detected_s for each in injections if each.detected_s is not None]),
        "recover": spread([injection.recovered_s for injection in injections]),
        "latency": spread([sample.took_s for each in of_kind for sample in each]),
    }


def _count_following(samples: Sequence[Sample], result: CampaignResult, kind: str | None) -> int:
    """Count samples that ended between a fault of this kind and the next fault; all samples if None."""
    if kind is None:
        return len(samples)
    starts = [injection.at_s for injection in result.injections]
    last = [bisect_right(starts, sample.done_s) - 1 for sample in samples]
    return sum(n >= 0 and result.injections[n].fault == kind for n in last)


def _verdict(result: CampaignResult, failed: Sequence[Sample]) -> list[str]:
    wanted = {fault.name for fault in result.faults} - result.skipped.keys()
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
