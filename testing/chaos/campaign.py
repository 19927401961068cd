"""Runs a campaign: a load, and one fault after another. Each fault waits until the service has recovered from the last."""

import itertools
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.testing.chaos.faults import FAULTS
from multiworld_serving.testing.chaos.faults.fault import NEEDS, WAIT_S, Fault, FaultContext, Scope
from multiworld_serving.testing.chaos.journal import Injection, Journal
from multiworld_serving.testing.chaos.observer import NotRecoveredError, ObservedReplica, Observer, Snapshot
from multiworld_serving.testing.chaos.system.processes import Resources, resources
from multiworld_serving.testing.load.clients import Load, run_load
from multiworld_serving.testing.load.requests import ReferenceRequest, count_indistinguishable, served_requests
from multiworld_serving.testing.local_service import RunningService
from multiworld_serving.testing.options import Plan

_DUPLICATES = "multiworld_duplicate_answers_total"


@dataclass(slots=True)
class CampaignResult:
    """All data of a campaign."""

    plan: Plan
    faults: Sequence[Fault]
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
    faults: Sequence[Fault],
    files: Sequence[tuple[bytes, str]],
    journal: Path | None,
    log: Callable[[str], None],
) -> CampaignResult:
    """Inject the planned faults into a service under load.

    Args:
        files: bodies and content types of requests to /predict, used in turn; empty generates requests for the served model.
        journal: None, or a file from which an interrupted campaign continues. It is removed when the campaign is complete.
        log: called with one line of text per event.
    Raises:
        httpx.HTTPError: the service does not answer before the first fault.
        NotRecoveredError: not all replicas are ready before the first fault.
        UserError: the journal cannot be used.
    """
    written = Journal(journal, plan.seed)
    found = CampaignResult(plan, faults, injections=[entry.injection for entry in written.entries])
    if found.injections:
        log(f"continues after {len(found.injections)} faults")
    with Observer(system.url, system.credentials, model=system.model) as observer:
        start = observer.wait(lambda now: now.complete, WAIT_S, "complete at the start")
        found.skipped = {fault.name: why for fault in faults if (why := unavailable_reason(fault, system, start))}
        for name, why in found.skipped.items():
            log(f"left out: {name} ({why})")
        common: Any = {"seed": plan.seed, "credentials": system.credentials}
        requests = served_requests(system.url, files, model=system.model, **common)
        if pairs := count_indistinguishable(requests):
            found.warnings.append(
                f"{pairs} pairs of requests have indistinguishable answers: swapping those would not be detected"
            )
        duplicates = observer.metric(_DUPLICATES)
        found.started_s = time.time() - written.elapsed_s  # the earlier runs count, and the time between them does not
        load = run_load(system.url, requests, clients=plan.clients, rate_hz=plan.rate, timeout_s=60.0, **common)
        with load as found.load:
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
        if not found.aborted:
            written.remove()
        found.duplicates = sum(injection.duplicates for injection in found.injections)
        with suppress(httpx.HTTPError):  # Ctrl-C in a terminal also stops a service that this process started
            late = round(_increase(duplicates, observer.metric(_DUPLICATES)))
            found.duplicates = max(found.duplicates, late)
    return found


def chosen_faults(names: str | None) -> list[Fault]:
    """Return the faults of a list such as "kill,freeze" (all if None), in the order of their declaration. Raises UserError."""
    if names is None:
        return list(FAULTS.values())
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in FAULTS]:
        raise UserError(f"--faults {','.join(unknown)}: there is no such fault; expected {', '.join(FAULTS)}")
    if not wanted:
        raise UserError("--faults: expected at least one fault")
    return [fault for name, fault in FAULTS.items() if name in wanted]


def _order(faults: Sequence[Fault], generator: random.Random) -> Iterator[Fault]:
    """Yield faults for ever, in rounds that contain each fault once in random order."""
    while True:
        yield from generator.sample(faults, len(faults))


def _groups(scope: Scope, now: Snapshot) -> list[tuple[ObservedReplica, ...]]:
    """Return all possible target sets of a fault of this scope."""
    stages: dict[int, list[ObservedReplica]] = {}
    for replica in now.replicas.values():
        stages.setdefault(replica.stage, []).append(replica)
    shared = [stage for stage in stages.values() if len(stage) > 1]
    if scope == "one":
        return [(replica,) for stage in shared for replica in stage]
    if scope == "two":
        return [pair for one, other in itertools.permutations(shared, 2) for pair in itertools.product(one, other)]
    return [tuple(stage) for stage in stages.values()] if scope == "stage" else [tuple(now.replicas.values())]


def choose_targets(fault: Fault, now: Snapshot, generator: random.Random) -> tuple[ObservedReplica, ...]:
    """Return the targets of this fault; empty for a scope without workers. Requires that it is available."""
    return generator.choice(_groups(fault.scope, now)) if fault.scope in NEEDS else ()


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
    if why := fault.unavailable_reason():
        return why
    if fault.scope in NEEDS and not _groups(fault.scope, now):
        return f"needs {NEEDS[fault.scope]}"
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
    faults = [fault for fault in found.faults if fault.name not in found.skipped]
    generator = random.Random(plan.seed)
    endless = itertools.islice(_order(faults, generator), len(found.injections), None) if faults else ()
    for number, fault in enumerate(endless, len(found.injections)):
        elapsed_s = time.time() - found.started_s
        if number >= plan.rounds * len(faults) if plan.duration_s is None else elapsed_s >= plan.duration_s:
            return
        before = observer.wait(lambda now: now.complete, WAIT_S, "complete")
        times = sum(injection.fault == fault.name for injection in found.injections)
        targets = choose_targets(fault, before, generator)
        context = FaultContext(system, observer, targets, plan.heartbeat_timeout_s, request, times)
        injection, used = inject(fault, context), _resources(system).values()
        memory_mib, descriptors = sum(each.resident_mib for each in used), sum(each.descriptors for each in used)
        injection = replace(injection, resident_mib=memory_mib, descriptors=descriptors)
        found.injections.append(injection)
        ended = found.load.samples[written:]
        written += len(ended)
        journal.append(time.time() - found.started_s, injection, ended)
        failed = f"  {len(found.load.failed)} failed so far, excused ones included" if found.load.failed else ""
        log(f"{injection.at_s - found.started_s:7.1f} s  {_describe(injection)}{failed}")
        if not injection.recovered:
            raise NotRecoveredError(f"the service has not recovered from {injection.fault}")
        time.sleep(plan.settle_s)


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


def _broken(targets: Sequence[ObservedReplica], snapshots: Sequence[Snapshot], at_s: float) -> list[tuple[str, float]]:
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
    wrong = sorted(set(causes).difference(fault.causes))
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
