"""Summarizes a campaign: excused failures, statistics per fault, and the verdict. Pure."""

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from multiworld_serving.testing.chaos.campaign import CampaignResult
from multiworld_serving.testing.chaos.observer import Outage
from multiworld_serving.testing.chaos.resources import RULE
from multiworld_serving.testing.load.clients import Sample
from multiworld_serving.testing.load.statistics import Spread

_POLL_S = 0.5
"""Tolerance: an outage is observed slightly shorter than it was."""


@dataclass(frozen=True, slots=True)
class Row:
    """Statistics of one fault. Times in seconds.

    Attributes:
        failed: requests that failed and are not excused.
        excused: requests that were refused because a stage had no replica for longer than the recovery grace, or that the fault excuses.
        before, during, after: latency of requests completed between the previous recovery and the fault, in flight between fault and
            recovery, and completed between recovery and the next fault.
    """

    fault: str
    times: int
    failed: int
    excused: int
    duplicates: int
    detect: Spread
    reroute: Spread
    recover: Spread
    before: Spread
    during: Spread
    after: Spread
    unexpected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The summary of a campaign. `verdict` lists what went wrong; empty if nothing did."""

    rows: list[Row]
    total: Row
    requests: int
    refused: int
    verdict: list[str]


def summarize(result: CampaignResult) -> Report:
    """Compute the report."""
    forgiven = [_is_excused(sample, result) for sample in result.load.failed]
    failed = [sample for sample, fine in zip(result.load.failed, forgiven, strict=True) if not fine]
    excused_ = [sample for sample, fine in zip(result.load.failed, forgiven, strict=True) if fine]
    kinds = dict.fromkeys(injection.fault for injection in result.injections)
    rows = [_row(kind, result, failed, excused_) for kind in kinds]
    return Report(
        rows=rows,
        total=_row(None, result, failed, excused_),
        requests=len(result.load.samples),
        refused=sum(sample.refused for sample in result.load.samples),
        verdict=_verdict(result, failed),
    )


def _is_excused(sample: Sample, result: CampaignResult) -> bool:
    if excused(sample, result.outages, result.plan.grace_s):
        return True
    return any(
        interrupted(sample, injection.excused, injection.at_s, injection.ended_s) for injection in result.injections
    )


def interrupted(sample: Sample, statuses: Collection[int], since_s: float, until_s: float) -> bool:
    """Whether the request got one of these statuses while a process was down in this interval. Other failures are not excused."""
    return sample.status in statuses and sample.done_s >= since_s and sample.sent_s <= until_s


def excused(sample: Sample, outages: Sequence[Outage], grace_s: float) -> bool:
    """Whether the request was refused while a stage had no replica for longer than the recovery grace."""
    return sample.status == 503 and any(
        outage.until_s - outage.since_s + _POLL_S >= grace_s
        and outage.since_s <= sample.done_s
        and sample.sent_s <= outage.until_s
        for outage in outages
    )


def to_json(result: CampaignResult, report: Report) -> dict[str, Any]:
    """Return the full result as JSON values; NaN becomes null."""
    plan = {name: value for name, value in asdict(result.plan).items() if name not in ("images", "faults", "protected")}
    document = {
        "plan": {
            **plan,
            "faults": [fault.name for fault in result.plan.faults],
            "protected": sorted(result.plan.protected),
        },
        "started_unix_s": result.started_s,
        "duration_s": result.ended_s - result.started_s,
        "requests": report.requests,
        "refused": report.refused,
        "failed": report.total.failed,
        "excused": report.total.excused,
        "duplicates": report.total.duplicates,
        "faults": [asdict(row) for row in report.rows],
        "total": asdict(report.total),
        "injections": [asdict(injection) for injection in result.injections],
        "failures": [asdict(sample) for sample in result.load.failed[:1000]],
        "outages": [asdict(outage) for outage in result.outages],
        "resources": {"rule": RULE, "series": [asdict(series) for series in result.resources]},
        "skipped": result.skipped,
        "warnings": result.warnings,
        "verdict": report.verdict or "ok",
    }
    cleaned: dict[str, Any] = _without_nan(document)
    return cleaned


def _row(kind: str | None, result: CampaignResult, failed: Sequence[Sample], excused_: Sequence[Sample]) -> Row:
    """Return the statistics of one fault, or of all if None."""
    chosen = [n for n, injection in enumerate(result.injections) if kind in (None, injection.fault)]
    injections = [result.injections[n] for n in chosen]
    windows = [_windows(result, n) for n in chosen]
    return Row(
        fault=kind or "all",
        times=len(injections),
        failed=_count_following(failed, result, kind),
        excused=_count_following(excused_, result, kind),
        duplicates=result.duplicates if kind is None else sum(injection.duplicates for injection in injections),
        detect=_spread([injection.detected_s for injection in injections]),
        reroute=_spread([injection.rerouted_s for injection in injections]),
        recover=_spread(
            [injection.recovered_s for injection in injections if injection.causes or injection.counters_reset]
        ),
        before=_latency([s for window in windows for s in _within(result, *window[0])]),
        during=_latency([s for window in windows for s in result.load.between(*window[1])]),
        after=_latency([s for window in windows for s in _within(result, *window[2])]),
        unexpected=tuple(item for injection in injections for item in injection.unexpected),
    )


def _count_following(samples: Sequence[Sample], result: CampaignResult, kind: str | None) -> int:
    """Count samples that ended between a fault of this kind and the next fault; all samples if None."""
    if kind is None:
        return len(samples)
    starts = [injection.at_s for injection in result.injections]
    last = [bisect_right(starts, sample.done_s) - 1 for sample in samples]
    return sum(n >= 0 and result.injections[n].fault == kind for n in last)


Window = tuple[float, float]


def _windows(result: CampaignResult, number: int) -> tuple[Window, Window, Window]:
    injection, everything = result.injections[number], result.injections
    since_s = everything[number - 1].ended_s if number else result.started_s
    until_s = everything[number + 1].at_s if number + 1 < len(everything) else result.ended_s
    return (since_s, injection.at_s), (injection.at_s, injection.ended_s), (injection.ended_s, until_s)


def _within(result: CampaignResult, since_s: float, until_s: float) -> list[Sample]:
    return [s for s in result.load.between(since_s, until_s) if s.sent_s >= since_s and s.done_s <= until_s]


def _latency(samples: Sequence[Sample]) -> Spread:
    return Spread.of([sample.took_s for sample in samples])


def _spread(values: Sequence[float | None]) -> Spread:
    return Spread.of([value for value in values if value is not None])


def _verdict(result: CampaignResult, failed: Sequence[Sample]) -> list[str]:
    grown = [f"{series.process}: {series.figure}" for series in result.resources if series.flat is False]
    wanted = {fault.name for fault in result.plan.faults} - result.skipped.keys()
    missing = sorted(wanted - {injection.fault for injection in result.injections})
    checks = [
        (result.aborted, f"ended early: {result.aborted}"),
        (not result.load.samples, "no request was sent"),
        (failed, f"{len(failed)} requests failed and are not excused: {_examples(failed)}"),
        (result.duplicates, f"{result.duplicates} requests were answered twice"),
        (missing, f"not injected before the end: {', '.join(missing)}"),
        *((True, f"{injection.fault}: {item}") for injection in result.injections for item in injection.unexpected),
        (grown, f"resource usage grows: {', '.join(grown)}"),
    ]
    return [text for wrong, text in checks if wrong]


def _examples(failed: Sequence[Sample]) -> str:
    kinds = dict.fromkeys(f"{sample.status} {sample.error[:100]}" for sample in failed)
    return "; ".join(list(kinds)[:3])


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
