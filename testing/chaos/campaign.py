"""Runs a campaign: a load, and one fault after another. Each fault waits until the service has recovered from the last."""

import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import httpx

from multiworld_serving.testing.chaos.faults.context import WAIT_S, FaultContext
from multiworld_serving.testing.chaos.faults.fault import NEEDS, Fault
from multiworld_serving.testing.chaos.injection import Injection
from multiworld_serving.testing.chaos.journal import Journal
from multiworld_serving.testing.chaos.observer import NotRecoveredError, Observer, Replica, Snapshot
from multiworld_serving.testing.chaos.schedule import choose_targets, missing_targets_reason, order
from multiworld_serving.testing.chaos.system.processes import Resources, resources
from multiworld_serving.testing.chaos.system.system_under_test import RunningService
from multiworld_serving.testing.load.clients import Load, run_load
from multiworld_serving.testing.load.requests import ReferenceRequest, count_indistinguishable, served_requests

_DUPLICATES = "multiworld_duplicate_answers_total"


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters of a campaign.

    Attributes:
        files: bodies and content types of requests to /predict, used in turn; empty generates requests for the served model.
        clients: number of clients of the closed loop; ignored with `rate_hz`.
        rate_hz: requests per second of an open loop; None for a closed loop.
        rounds: injections of each fault; None continues until `duration_s` has passed.
        settle_s: pause between recovery and the next fault.
        grace_s: how long the service keeps requests for a stage without replicas.
    """

    files: Sequence[tuple[bytes, str]]
    faults: Sequence[Fault]
    clients: int = 8
    rate_hz: float | None = None
    rounds: int | None = 1
    duration_s: float | None = None
    settle_s: float = 2.0
    seed: int = 0
    heartbeat_timeout_s: float = 1.0
    grace_s: float = 15.0
    request_timeout_s: float = 60.0


@dataclass(slots=True)
class CampaignResult:
    """All data of a campaign."""

    plan: Plan
    started_s: float = 0.0
    ended_s: float = 0.0
    injections: list[Injection] = field(default_factory=list)
    load: Load = field(default_factory=Load)
    duplicates: int = 0
    resources: dict[str, tuple[Resources, Resources]] = field(default_factory=dict)
    """Resources of each process that lived from the first fault to the end, before and after."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Faults that were not injected, with the reason."""
    warnings: list[str] = field(default_factory=list)
    aborted: str = ""
    """Why the campaign ended early; empty if it did not."""


def run(
    system: RunningService,
    plan: Plan,
    *,
    journal: Path | None = None,
    log: Callable[[str], None] = lambda _line: None,
) -> CampaignResult:
    """Inject the planned faults into a service under load.

    Args:
        journal: a file from which an interrupted campaign continues. It is removed when the campaign is complete.
        log: called with one line of text per event.
    Raises:
        httpx.HTTPError: the service does not answer before the first fault.
        NotRecoveredError: not all replicas are ready before the first fault.
        UserError: the journal cannot be used.
    """
    found, written = CampaignResult(plan), Journal(journal, plan.seed)
    found.injections = [entry.injection for entry in written.entries]
    if found.injections:
        log(f"continues after {len(found.injections)} faults")
    with Observer(system.url, system.credentials, model=system.model) as observer:
        start = observer.wait(lambda now: now.complete, WAIT_S, "complete at the start")
        found.skipped = {fault.name: why for fault in plan.faults if (why := unavailable_reason(fault, system, start))}
        for name, why in found.skipped.items():
            log(f"left out: {name} ({why})")
        requests = served_requests(
            system.url, plan.files, model=system.model, seed=plan.seed, credentials=system.credentials
        )
        if pairs := count_indistinguishable(requests):
            found.warnings.append(
                f"{pairs} pairs of requests have indistinguishable answers: swapping those would not be detected"
            )
        duplicates = observer.metric(_DUPLICATES)
        found.started_s = time.time()
        with run_load(
            system.url,
            requests,
            clients=plan.clients,
            rate_hz=plan.rate_hz,
            timeout_s=plan.request_timeout_s,
            seed=plan.seed,
            credentials=system.credentials,
        ) as found.load:
            time.sleep(plan.settle_s)
            before = _resources(system)
            try:
                _inject_all(system, observer, requests[0], found, written, log)
            except NotRecoveredError as error:
                found.aborted = str(error)
            except KeyboardInterrupt:
                found.aborted = "interrupted"
            found.resources = {name: (before[name], now) for name, now in _resources(system).items() if name in before}
        found.ended_s = time.time()
        found.load.samples[:0] = [sample for entry in written.entries for sample in entry.samples]
        found.started_s -= written.elapsed_s  # the earlier runs count, and the time between them does not
        if not found.aborted:
            written.remove()
        found.duplicates = sum(injection.duplicates for injection in found.injections)
        with suppress(httpx.HTTPError):  # Ctrl-C in a terminal also stops a service that this process started
            late = round(_increase(duplicates, observer.metric(_DUPLICATES)))
            found.duplicates = max(found.duplicates, late)
    return found


def _resources(system: RunningService) -> dict[str, Resources]:
    """Return threads, descriptors and memory of the processes of the service that run now, by name and process id."""
    found: dict[str, Resources] = {}
    with suppress(httpx.HTTPError):
        pids = {("supervisor", system.pid), *system.worker_pids().items()}
        for kind in ("leader", "frontend"):
            pids |= {(f"{kind}-{slot}", pid) for slot, pid in system.child_pids(kind).items()}
        for name, pid in pids:
            if pid is not None:
                with suppress(OSError):  # ended in the meantime
                    found[f"{name} pid {pid}"] = resources(pid)
    return found


def unavailable_reason(fault: Fault, system: RunningService, now: Snapshot) -> str:
    """Return why this fault is not possible on this machine and service now; empty if it is."""
    if why := fault.unavailable_reason() or missing_targets_reason(fault, now):
        return why
    if fault.scope in ("leader", "frontend") and not system.child_pids(fault.scope):
        return f"no {fault.scope} on this machine is a process of `multiworld serve`"
    if fault.scope not in NEEDS:
        return ""
    known = system.worker_pids()
    unknown = sorted(str(r.worker) for r in now.replicas.values() if str(r.worker) not in known)
    return f"the processes of {', '.join(unknown)} do not run on this machine" if unknown else ""


def _inject_all(
    system: RunningService,
    observer: Observer,
    request: ReferenceRequest,
    found: CampaignResult,
    journal: Journal,
    log: Callable[[str], None],
) -> None:
    plan, written = found.plan, 0
    faults = [fault for fault in plan.faults if fault.name not in found.skipped]
    generator = random.Random(plan.seed)
    endless = islice(order(faults, generator), len(found.injections), None) if faults else ()
    for number, fault in enumerate(endless, len(found.injections)):
        if _is_finished(plan, number, len(faults), journal.elapsed_s + time.time() - found.started_s):
            return
        before = observer.wait(lambda now: now.complete, WAIT_S, "complete")
        times = sum(injection.fault == fault.name for injection in found.injections)
        targets = choose_targets(fault, before, generator)
        context = FaultContext(system, observer, targets, plan.heartbeat_timeout_s, request, times)
        injection, used = inject(fault, context), _resources(system).values()
        injection = replace(
            injection,
            resident_mib=sum(each.resident_mib for each in used),
            descriptors=sum(each.descriptors for each in used),
        )
        found.injections.append(injection)
        ended = found.load.samples[written:]
        written += len(ended)
        journal.append(journal.elapsed_s + time.time() - found.started_s, injection, ended)
        failed = f"  {len(found.load.failed)} failed so far, excused ones included" if found.load.failed else ""
        log(f"{injection.at_s - found.started_s:7.1f} s  {_describe(injection)}{failed}")
        if not injection.recovered:
            raise NotRecoveredError(f"the service has not recovered from {injection.fault}")
        time.sleep(plan.settle_s)


def _is_finished(plan: Plan, made: int, kinds: int, elapsed_s: float) -> bool:
    if plan.duration_s is not None:
        return elapsed_s >= plan.duration_s
    return plan.rounds is not None and made >= plan.rounds * kinds


def inject(fault: Fault, context: FaultContext) -> Injection:
    """Inject one fault and wait until the service has recovered or the timeout has passed."""
    observer = context.observer
    duplicates = observer.metric(_DUPLICATES)
    begun_s = time.time()
    recovered = _inject_and_wait(fault, context)
    at_s, ended_s = context.at_s or begun_s, time.time()
    broken = _broken(context.targets, observer.snapshots, at_s)
    causes = tuple(sorted(cause for cause, _ in broken))
    context.unexpected += _unexpected_causes(fault, causes)
    lost_s = [] if context.lost_s is None else [context.lost_s]
    detected_s = min((each_s - at_s for each_s in (*lost_s, *(each_s for _, each_s in broken))), default=None)
    return Injection(
        fault=fault.name,
        targets=(*(f"s{target.stage}.r{target.slot}" for target in context.targets), *filter(None, [context.victim])),
        at_s=at_s,
        ended_s=ended_s,
        causes=causes,
        detected_s=detected_s,
        recovered_s=max(0.0, recovered.at_s - at_s) if broken and recovered else ended_s - at_s,
        recovered=recovered is not None,
        duplicates=round(_increase(duplicates, observer.metric(_DUPLICATES))),
        # With two leaders, a fault of one excuses nothing.
        excused=() if fault.scope == "leader" and len(observer.now.leaders) > 1 else tuple(sorted(fault.excused)),
        unexpected=tuple(context.unexpected),
    )


def _increase(before: float, now: float) -> float:
    """The increase of a counter, which starts at 0 in a new leader."""
    return now - before if now >= before else now


def _inject_and_wait(fault: Fault, context: FaultContext) -> Snapshot | None:
    """Inject the fault. Returns the first snapshot with all replicas ready again; None after the timeout."""
    try:
        fault.inject(context)
        if fault.causes:
            context.wait_broken()
    except (ProcessLookupError, KeyError) as error:
        context.unexpected.append(f"a target process had ended before the injection: {error!r}")
    except NotRecoveredError as error:
        context.unexpected.append(str(error))
    except (OSError, subprocess.SubprocessError) as error:
        context.unexpected.append(f"the fault could not be injected: {error}")
    try:
        return context.wait_complete()
    except NotRecoveredError as error:
        context.unexpected.append(str(error))
        return None


def _broken(targets: Sequence[Replica], snapshots: Sequence[Snapshot], at_s: float) -> list[tuple[str, float]]:
    """Return cause and detection time of the first break of each target."""
    found = []
    for target in targets:
        now = next((m for m in snapshots if m.at_s >= at_s and m.replicas[target.key].broken_since(target)), None)
        if now is None:
            continue
        after = now.replicas[target.key]
        failed_s = after.failed_s
        # Without a ready replica, the status may come from another leader, which knows earlier failures of its own.
        is_new = failed_s is not None and (
            failed_s >= at_s or (after.leader == target.leader and failed_s != target.failed_s)
        )
        if after.cause is not None and failed_s is not None and is_new:
            # The timestamp of the leader is exact if both clocks agree.
            found.append((after.cause, failed_s if at_s <= failed_s <= now.at_s else now.at_s))
        else:
            found.append(("left", now.at_s))
    return found


def _unexpected_causes(fault: Fault, causes: Sequence[str]) -> list[str]:
    if fault.causes is None:
        return []
    wrong = sorted(set(causes) - fault.causes)
    expected = " or ".join(sorted(fault.causes)) or "no break"
    return [f"broke with cause {', '.join(wrong)}, expected {expected}"] if wrong else []


def _describe(injection: Injection) -> str:
    causes = ",".join(f"{cause} x{n}" if n > 1 else cause for cause, n in Counter(injection.causes).items())
    facts = [
        f"{injection.fault:14} {' '.join(injection.targets) or '-':10}",
        "no break"
        if injection.detected_s is None
        else f"detected {injection.detected_s * 1e3:.0f} ms ({causes or 'lost'})",
        f"recovered {injection.recovered_s:.1f} s",
        *(f"UNEXPECTED: {item}" for item in injection.unexpected),
    ]
    return "  ".join(facts)
