"""What a campaign comes to: which failures nobody could have prevented, figures for each kind of fault, and the verdict. Pure."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from chaos.campaign import Findings
from chaos.load import Sample
from chaos.observer import Outage
from chaos.soak import RULE
from chaos.statistics import Spread

_POLL_S = 0.5
"""An outage is seen a little shorter than it was."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of fault. Times in seconds.

    Attributes:
        failed: requests that failed although a replica could have saved them.
        excused: requests that were refused because a stage had no replica for longer than the service's grace.
        before, during, after: latency of the requests that came and were answered between the recovery before and the fault; of those
            that were under way at some moment between fault and recovery; and of those between recovery and the next fault.
    """

    fault: str
    times: int
    failed: int
    excused: int
    doubles: int
    detect: Spread
    reroute: Spread
    recover: Spread
    before: Spread
    during: Spread
    after: Spread
    surprises: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """All of it. `verdict` is empty when all went well, else what did not, for people."""

    rows: list[Row]
    total: Row
    requests: int
    refused: int
    verdict: list[str]


def summed_up(found: Findings) -> Report:
    """Count, and judge."""
    forgiven = [_forgiven(sample, found) for sample in found.load.failed]
    failed = [sample for sample, fine in zip(found.load.failed, forgiven, strict=True) if not fine]
    excused_ = [sample for sample, fine in zip(found.load.failed, forgiven, strict=True) if fine]
    kinds = dict.fromkeys(injection.fault for injection in found.injections)
    rows = [_row(kind, found, failed, excused_) for kind in kinds]
    return Report(
        rows=rows,
        total=_row(None, found, failed, excused_),
        requests=len(found.load.samples),
        refused=sum(sample.refused for sample in found.load.samples),
        verdict=_verdict(found, failed),
    )


def _forgiven(sample: Sample, found: Findings) -> bool:
    if excused(sample, found.outages, found.plan.grace_s):
        return True
    return any(
        injection.leader_away and leaderless(sample, injection.at_s, injection.ended_s)
        for injection in found.injections
    )


def leaderless(sample: Sample, since_s: float, until_s: float) -> bool:
    """Whether it had no answer, or 503, because the leader was away at some moment of that time. No other failure is forgiven for that."""
    return sample.status in (0, 503) and sample.done_s >= since_s and sample.sent_s <= until_s


def excused(sample: Sample, outages: Sequence[Outage], grace_s: float) -> bool:
    """Whether nobody could have saved this request: refused while a stage was without a replica for longer than the grace."""
    return sample.status == 503 and any(
        outage.until_s - outage.since_s + _POLL_S >= grace_s
        and outage.since_s <= sample.done_s
        and sample.sent_s <= outage.until_s
        for outage in outages
    )


def to_json(found: Findings, report: Report) -> dict[str, Any]:
    """Everything, for programs; not-a-number, which JSON lacks, becomes null."""
    plan = {name: value for name, value in asdict(found.plan).items() if name not in ("images", "faults", "protected")}
    document = {
        "plan": {
            **plan,
            "faults": [fault.name for fault in found.plan.faults],
            "protected": sorted(found.plan.protected),
        },
        "started_unix_s": found.started_s,
        "duration_s": found.ended_s - found.started_s,
        "requests": report.requests,
        "refused": report.refused,
        "failed": report.total.failed,
        "excused": report.total.excused,
        "doubles": report.total.doubles,
        "faults": [asdict(row) for row in report.rows],
        "total": asdict(report.total),
        "injections": [asdict(injection) for injection in found.injections],
        "failures": [asdict(sample) for sample in found.load.failed[:1000]],
        "outages": [asdict(outage) for outage in found.outages],
        "resources": {"rule": RULE, "series": [asdict(series) for series in found.resources]},
        "left_out": found.left_out,
        "warnings": found.warnings,
        "verdict": report.verdict or "ok",
    }
    cleaned: dict[str, Any] = _without_nan(document)
    return cleaned


def _row(kind: str | None, found: Findings, failed: Sequence[Sample], excused_: Sequence[Sample]) -> Row:
    """The figures of one kind of fault, of all of them if None."""
    chosen = [n for n, injection in enumerate(found.injections) if kind in (None, injection.fault)]
    injections = [found.injections[n] for n in chosen]
    windows = [_windows(found, n) for n in chosen]
    return Row(
        fault=kind or "all together",
        times=len(injections),
        failed=_blamed(failed, found, kind),
        excused=_blamed(excused_, found, kind),
        doubles=found.doubles if kind is None else sum(injection.doubles for injection in injections),
        detect=_spread([injection.detected_s for injection in injections]),
        reroute=_spread([injection.rerouted_s for injection in injections]),
        recover=_spread([injection.recovered_s for injection in injections if injection.causes]),
        before=_latency([s for window in windows for s in _within(found, *window[0])]),
        during=_latency([s for window in windows for s in found.load.between(*window[1])]),
        after=_latency([s for window in windows for s in _within(found, *window[2])]),
        surprises=tuple(surprise for injection in injections for surprise in injection.surprises),
    )


def _blamed(samples: Sequence[Sample], found: Findings, kind: str | None) -> int:
    """How many of these ended after a fault of this kind and before the next fault; all of them if None."""
    if kind is None:
        return len(samples)
    starts = [injection.at_s for injection in found.injections]
    last = [bisect_right(starts, sample.done_s) - 1 for sample in samples]
    return sum(n >= 0 and found.injections[n].fault == kind for n in last)


Window = tuple[float, float]


def _windows(found: Findings, number: int) -> tuple[Window, Window, Window]:
    injection, everything = found.injections[number], found.injections
    since_s = everything[number - 1].ended_s if number else found.started_s
    until_s = everything[number + 1].at_s if number + 1 < len(everything) else found.ended_s
    return (since_s, injection.at_s), (injection.at_s, injection.ended_s), (injection.ended_s, until_s)


def _within(found: Findings, since_s: float, until_s: float) -> list[Sample]:
    return [s for s in found.load.between(since_s, until_s) if s.sent_s >= since_s and s.done_s <= until_s]


def _latency(samples: Sequence[Sample]) -> Spread:
    return Spread.of([sample.took_s for sample in samples])


def _spread(values: Sequence[float | None]) -> Spread:
    return Spread.of([value for value in values if value is not None])


def _verdict(found: Findings, failed: Sequence[Sample]) -> list[str]:
    grown = [f"{series.process}: {series.figure}" for series in found.resources if series.flat is False]
    wanted = {fault.name for fault in found.plan.faults} - found.left_out.keys()
    missing = sorted(wanted - {injection.fault for injection in found.injections})
    complaints = [
        (found.aborted, f"ended early: {found.aborted}"),
        (not found.load.samples, "no request was sent"),
        (failed, f"{len(failed)} requests failed that a replica could have saved: {_first(failed)}"),
        (found.doubles, f"{found.doubles} answers came twice"),
        (missing, f"there was no time for {', '.join(missing)}"),
        *(
            (True, f"{injection.fault}: {surprise}")
            for injection in found.injections
            for surprise in injection.surprises
        ),
        (grown, f"grows: {', '.join(grown)}"),
    ]
    return [text for wrong, text in complaints if wrong]


def _first(failed: Sequence[Sample]) -> str:
    kinds = dict.fromkeys(f"{sample.status} {sample.error[:100]}" for sample in failed)
    return "; ".join(list(kinds)[:3])


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
