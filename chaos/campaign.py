"""Runs it all: a load, and one fault after another, each once the service has recovered from the last."""

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import httpx

from chaos.containers import ComposeProject, ContainerError, why_no_processes
from chaos.faults import Fault
from chaos.load import Load, Question, alike, ask_quietly, load_on
from chaos.observer import Moment, NotRecoveredError, Observer, Outage, Replica
from chaos.scene import WAIT_S, Scene
from chaos.schedule import NO_WORKER, Victims, lacking, order
from chaos.soak import ResourceWatch, Series
from chaos.target import Target

_DOUBLES = "multiworld_duplicate_answers_total"
_REROUTES = "multiworld_reroute_seconds"
_LOOK_AT_CONTAINERS_S = 5.0
"""Docker's command takes its time, which others could use."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done.

    Attributes:
        images: bodies and content types to ask about, in turn.
        clients: of the closed loop; not used with a rate.
        rate_hz: requests a second of an open loop; None for a closed loop.
        rounds: how many times each fault; None goes on until `duration_s` is over.
        every_s: least time from the start of a fault to that of the next.
        settle_s: pause between recovery and the next fault.
        protected: names of workers that are never hurt.
        grace_s: how long the service lets requests wait for a stage without replicas.
    """

    images: Sequence[tuple[bytes, str]]
    faults: Sequence[Fault]
    clients: int = 8
    rate_hz: float | None = None
    rounds: int | None = 1
    duration_s: float | None = None
    every_s: float = 0.0
    settle_s: float = 2.0
    seed: int = 0
    protected: frozenset[str] = frozenset()
    heartbeat_timeout_s: float = 1.0
    grace_s: float = 15.0
    request_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault and what followed. Times in seconds since it was made, unless they are moments on the clock of `time.time()`.

    Attributes:
        detected_s: until the leader had noticed the first victim's break; None when no world broke.
        rerouted_s: until the batches that it stranded were on their way elsewhere, on average; None when there were none.
        recovered_s: until every slot served again.
        recovered: whether they did, within the time that is waited for it.
        leader_away: whether it was the leader who was hurt.
        surprises: what was not as the fault expects.
    """

    fault: str
    victims: tuple[str, ...]
    at_s: float
    ended_s: float
    causes: tuple[str, ...] = ()
    detected_s: float | None = None
    rerouted_s: float | None = None
    reroutes: int = 0
    recovered_s: float = 0.0
    recovered: bool = True
    doubles: int = 0
    leader_away: bool = False
    surprises: tuple[str, ...] = ()


@dataclass(slots=True)
class Findings:
    """Everything that a campaign has seen."""

    plan: Plan
    started_s: float = 0.0
    ended_s: float = 0.0
    injections: list[Injection] = field(default_factory=list)
    load: Load = field(default_factory=Load)
    outages: list[Outage] = field(default_factory=list)
    doubles: int = 0
    resources: list[Series] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Faults that were not made, and why."""
    warnings: list[str] = field(default_factory=list)
    aborted: str = ""
    """Why it ended early; empty when it did not."""


def run(target: Target, plan: Plan, *, tell: Callable[[str], None] = lambda _line: None) -> Findings:
    """Hurt a service as planned, while clients ask it.

    Args:
        tell: called with one line for people about each thing that happens.
    Raises:
        httpx.HTTPError: the service does not answer before anything was done to it.
        NotRecoveredError: it was not complete before anything was done to it.
    """
    found = Findings(plan)
    with ExitStack() as stack:
        observer = stack.enter_context(Observer(target.url, target.way_in))
        start = observer.wait(lambda now: now.complete, WAIT_S, "complete at the start")
        faults = _possible(plan, target, start, found, tell)
        questions = ask_quietly(target.url, plan.images, way_in=target.way_in)
        if pairs := alike(questions):
            found.warnings.append(f"{pairs} pairs of images have the same answer: a mix-up of those would go unseen")
        doubles = observer.metric(_DOUBLES)
        every_s = _LOOK_AT_CONTAINERS_S if isinstance(target, ComposeProject) else 1.0
        watch = stack.enter_context(ResourceWatch(target, every_s))
        found.started_s = time.time()
        with load_on(
            target.url,
            questions,
            clients=plan.clients,
            rate_hz=plan.rate_hz,
            timeout_s=plan.request_timeout_s,
            seed=plan.seed,
            way_in=target.way_in,
        ) as found.load:
            time.sleep(plan.settle_s)
            try:
                _inject_all(target, observer, faults, questions[0], found, tell)
            except NotRecoveredError as error:
                found.aborted = str(error)
            except KeyboardInterrupt:
                found.aborted = "interrupted"
        found.ended_s = time.time()
        found.doubles = sum(injection.doubles for injection in found.injections)
        if not any(injection.leader_away for injection in found.injections):  # else it has begun to count anew
            with suppress(httpx.HTTPError):  # Ctrl-C in a terminal reaches a service of our own too
                found.doubles = round(observer.metric(_DOUBLES) - doubles)
        found.outages, found.resources = observer.outages(), watch.series()
    return found


def _possible(plan: Plan, target: Target, start: Moment, found: Findings, tell: Callable[[str], None]) -> list[Fault]:
    """The faults that can be made, here and to this service. Says loudly which cannot."""
    for fault in plan.faults:
        if why := why_not(fault, target, start, plan.protected):
            found.left_out[fault.name] = why
            tell(f"LEFT OUT: {fault.name}: {why}")
    return [fault for fault in plan.faults if fault.name not in found.left_out]


def why_not(fault: Fault, target: Target, now: Moment, protected: frozenset[str] = frozenset()) -> str:
    """Why this fault cannot be made, here and to this service as it is now; empty when it can."""
    return fault.why_not() or lacking(fault, now, protected) or _out_of_reach(fault, target, now)


def _out_of_reach(fault: Fault, target: Target, now: Moment) -> str:
    in_containers = isinstance(target, ComposeProject)
    if fault.of == "container":
        return "" if in_containers else "is done to containers: name their project with --compose"
    if fault.scope in NO_WORKER:
        return ""
    if in_containers and (why := why_no_processes()):
        return why
    known = target.worker_pids()
    unknown = sorted(str(r.worker) for r in now.replicas.values() if str(r.worker) not in known)
    hint = "their containers run on another machine than this" if in_containers else "give the service's log with --log"
    return f"the processes of {', '.join(unknown)} are not known: {hint}" if unknown else ""


def _inject_all(
    target: Target,
    observer: Observer,
    faults: Sequence[Fault],
    question: Question,
    found: Findings,
    tell: Callable[[str], None],
) -> None:
    plan = found.plan
    victims = Victims(plan.seed, plan.protected)
    for number, fault in enumerate(order(faults, plan.seed) if faults else ()):
        if _enough(plan, number, len(faults), time.time() - found.started_s):
            return
        before = observer.wait(lambda now: now.complete, WAIT_S, "complete")
        scene = Scene(target, observer, victims.choose(fault, before), plan.heartbeat_timeout_s, question)
        injection = inject(fault, scene)
        found.injections.append(injection)
        failed = f"  {len(found.load.failed)} NOT ANSWERED so far" if found.load.failed else ""
        tell(f"{injection.at_s - found.started_s:7.1f} s  {_told(injection)}{failed}")
        if not injection.recovered:
            raise NotRecoveredError(f"the service has not recovered from {injection.fault}")
        time.sleep(max(plan.settle_s, injection.at_s + plan.every_s - time.time()))


def _enough(plan: Plan, made: int, kinds: int, elapsed_s: float) -> bool:
    if plan.duration_s is not None:
        return elapsed_s >= plan.duration_s
    return plan.rounds is not None and made >= plan.rounds * kinds


def inject(fault: Fault, scene: Scene) -> Injection:
    """Make one fault and wait until the service has recovered from it, or until it is clear that it does not."""
    observer = scene.observer
    before = {name: observer.metric(name) for name in (_DOUBLES, f"{_REROUTES}_count", f"{_REROUTES}_sum")}
    begun_s = time.time()
    recovered = _inject_and_wait(fault, scene)
    at_s, ended_s = scene.at_s or begun_s, time.time()
    broken = _broken(scene.victims, observer.moments, at_s)
    causes = tuple(sorted(cause for cause, _ in broken))
    scene.surprises += _unexpected(fault, causes)
    detected_s = min((noticed_s - at_s for _, noticed_s in broken), default=None)
    # A leader that was started anew counts from nothing.
    more = {name: observer.metric(name) - (0.0 if fault.scope == "leader" else was) for name, was in before.items()}
    count = round(more[f"{_REROUTES}_count"])
    mean_s = more[f"{_REROUTES}_sum"] / count if count else None
    return Injection(
        fault=fault.name,
        victims=tuple(f"s{victim.stage}.r{victim.slot}" for victim in scene.victims),
        at_s=at_s,
        ended_s=ended_s,
        causes=causes,
        detected_s=detected_s,
        rerouted_s=None if mean_s is None or detected_s is None else detected_s + mean_s,
        reroutes=count,
        recovered_s=max(0.0, recovered.at_s - at_s) if broken and recovered else ended_s - at_s,
        recovered=recovered is not None,
        doubles=round(more[_DOUBLES]),
        leader_away=fault.scope == "leader",
        surprises=tuple(scene.surprises),
    )


def _inject_and_wait(fault: Fault, scene: Scene) -> Moment | None:
    """The moment at which all was well again; None when it never was."""
    try:
        fault.inject(scene)
        if fault.causes:
            scene.wait_broken()
    except (ProcessLookupError, KeyError) as error:
        scene.surprises.append(f"a victim had ended before it was hurt: {error!r}")
    except (NotRecoveredError, ContainerError) as error:
        scene.surprises.append(str(error))
    except (OSError, subprocess.SubprocessError) as error:
        scene.surprises.append(f"it could not be made: {error}")
    try:
        return scene.wait_complete()
    except NotRecoveredError as error:
        scene.surprises.append(str(error))
        return None


def _broken(victims: Sequence[Replica], moments: Sequence[Moment], at_s: float) -> list[tuple[str, float]]:
    """The victims' first breaks: each with its cause, and when the leader noticed it."""
    found = []
    for victim in victims:
        now = next((m for m in moments if m.at_s >= at_s and m.replicas[victim.place].broken_since(victim)), None)
        if now is None:
            continue
        after = now.replicas[victim.place]
        if after.cause is not None and after.failed_s is not None and after.failed_s != victim.failed_s:
            # The leader's own time is exact, if its clock is ours.
            found.append((after.cause, after.failed_s if at_s <= after.failed_s <= now.at_s else now.at_s))
        else:
            found.append(("left", now.at_s))
    return found


def _unexpected(fault: Fault, causes: Sequence[str]) -> list[str]:
    if fault.causes is None:
        return []
    wrong = sorted(set(causes) - fault.causes)
    expected = " or ".join(sorted(fault.causes)) or "no break"
    return [f"broke with cause {', '.join(wrong)}, expected {expected}"] if wrong else []


def _told(injection: Injection) -> str:
    causes = ",".join(f"{cause} x{n}" if n > 1 else cause for cause, n in Counter(injection.causes).items())
    facts = [
        f"{injection.fault:14} {' '.join(injection.victims) or '-':10}",
        f"detected {injection.detected_s * 1e3:.0f} ms ({causes})" if injection.detected_s is not None else "no break",
        f"{injection.reroutes} rerouted",
        f"recovered {injection.recovered_s:.1f} s",
        *(f"SURPRISE: {surprise}" for surprise in injection.surprises),
    ]
    return "  ".join(facts)
