"""Decides what to do with the workers: from what is desired and what they are, the next steps. Pure.

The invariants, which `tests/unit/scheduling/test_reconcile.py` checks with random failures:

- No step takes the last ready replica of a stage that serves.
- At most one worker at a time is moved or restarted, and only while every other one is settled.
- A version is loaded by one worker of a stage first. The next ones load when it has passed the self-test, one on each host at a time:
  a version that kills its worker takes one replica of a stage.
- A lost worker delays a version. The next attempt waits, longer after each loss in a row.
- After the steps are performed there are none, until a worker or what is desired changes, or `wake_s` has come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from multiworld_serving.server.leader.replicas.placement import Placement, Slot
from multiworld_serving.server.leader.replicas.worker import Worker

REASSIGN_AFTER_S = 3.0
"""How long a stage may have no worker before a worker of a stage with several is reassigned to it."""
BALANCE_AFTER_S = 15.0
"""How long a stage may have fewer replicas than wanted before an extra replica of another stage is reassigned to it, how long a
spare may be missing while a stage has an extra replica, and how long two replicas may share a host if an exchange would separate them."""
_SLOT_RETENTION_S = 60.0
"""How long an extra slot of a failed worker is kept for a successor."""
_MAX_LOSSES = 3
"""A version is given up after this many workers in a row were lost while they loaded it."""
_RETRY_S = 0.5
"""Pause after the first of them; it doubles."""


@dataclass(slots=True)
class Loading:
    """A version that all workers are to load.

    Attributes:
        give_up_s: when it is given up, if no worker has loaded it until then.
        losses: workers in a row that were lost while they loaded it.
        retry_s: no worker begins to load it before.
    """

    version: int
    give_up_s: float
    losses: int = 0
    retry_s: float = float("-inf")

    def lost(self, now_s: float) -> None:
        """A worker was lost while it loaded the version."""
        self.losses += 1
        self.retry_s = now_s + _RETRY_S * 2 ** (self.losses - 1)

    def passed(self, give_up_s: float) -> None:
        """A worker has loaded the version."""
        self.losses, self.give_up_s = 0, give_up_s


@dataclass(slots=True)
class Goal:
    """What the workers are to be.

    Attributes:
        serving: the current version, and the former one until its requests have ended.
        loading: the version that is to follow.
        restart: the worker that is to be restarted.
        drained: the hosts whose workers are to leave.
        settle_until_s: until then, more workers with stages in memory are expected: nothing is promoted or reassigned.
        moved_s: when a worker was reassigned last.
        destined: the stage that a worker takes when it joins again, by name of the worker.
    """

    serving: tuple[int, ...]
    loading: Loading | None = None
    restart: Worker | None = None
    drained: frozenset[str] = frozenset()
    settle_until_s: float = float("-inf")
    moved_s: float = float("-inf")
    destined: dict[str, int] = field(default_factory=dict)


StepKind = Literal[
    "activate",  # the scheduler may send it batches of this version
    "drain",  # and no more of them
    "load",  # beside the versions that it serves
    "unload",
    "move",  # it leaves, and joins again where it is needed
    "restart",
    "close",  # it has no batches any more, or nothing that is served
]


class WorkerStep(NamedTuple):
    """A step with one worker.

    Attributes:
        stage: of "move": the stage that the worker joins next; None: `Placement.choose_stage` decides when it joins.
    """

    kind: StepKind
    worker: Worker
    version: int = 0
    stage: int | None = None


class Promote(NamedTuple):
    """A spare takes a free slot."""

    spare: Slot
    slot: Slot


class RemoveSlot(NamedTuple):
    """An extra slot is not needed any more."""

    slot: Slot


class Switch(NamedTuple):
    """All workers have loaded this version: new requests use it."""

    version: int


class GiveUp(NamedTuple):
    """The version cannot be loaded."""

    why: str


Step = WorkerStep | Promote | RemoveSlot | Switch | GiveUp


@dataclass(slots=True)
class Steps:
    """What to do now, in order.

    Attributes:
        wake_s: when to reconcile again at the latest; None: when something has changed.
    """

    now: list[Step] = field(default_factory=list)
    wake_s: float | None = None

    def at(self, time_s: float, now_s: float) -> bool:
        """Whether this time has come; otherwise wake up then."""
        if time_s <= now_s:
            return True
        self.wake_s = time_s if self.wake_s is None else min(self.wake_s, time_s)
        return False


def reconcile(goal: Goal, placement: Placement, now_s: float) -> Steps:
    """The steps from what the workers are to what is desired."""
    steps = Steps()
    for worker in placement.workers():
        steps.now += _of_worker(worker, goal)
    extra = {stage: placement.num_extra(stage) for stage in (*range(placement.num_stages), None)}
    for slot in placement.slots:
        is_unused = slot.free and slot.worker is not None and extra[slot.id.stage] > 0
        if is_unused and (slot.left or steps.at(_kept_until_s(slot), now_s)):
            extra[slot.id.stage] -= 1
            steps.now.append(RemoveSlot(slot))
    if goal.loading is not None:
        _load(goal.loading, placement, steps, now_s)
    leaving = _leaving(goal, placement)
    if leaving is not None:
        steps.now.append(WorkerStep("restart", leaving))
        return steps
    if steps.at(goal.settle_until_s, now_s):
        _fill(goal, placement, steps, now_s)
    if goal.restart is not None and _may_restart(goal.restart, placement):
        steps.now.append(WorkerStep("restart", goal.restart))
    return steps


def _kept_until_s(slot: Slot) -> float:
    """How long the slot of a failed worker is kept for a successor. Spares have no slot without a worker."""
    failed_s = slot.worker.since_s if slot.worker is not None else 0.0
    return failed_s + (0.0 if slot.id.stage is None else _SLOT_RETENTION_S)


def _leaving(goal: Goal, placement: Placement) -> Worker | None:
    """The next worker of a drained host that leaves: a spare, or a replica of a stage that another host serves, too."""
    if not goal.drained or any(each.busy_with or each.state == "draining" for each in placement.workers()):
        return None
    ready = placement.ready()
    staying = {None, *(each.slot.stage for each in ready if each.request.host not in goal.drained)}
    leaving = (each for each in ready if each.request.host in goal.drained and each.slot.stage in staying)
    return next(leaving, None)


def _may_restart(worker: Worker, placement: Placement) -> bool:
    is_quiet = not any(each.busy_with for each in placement.workers())
    return worker.state == "ready" and is_quiet and placement.fully_replicated


def _of_worker(worker: Worker, goal: Goal) -> Iterator[Step]:
    """What the scheduler may use, and what the worker holds."""
    if worker.state not in ("ready", "draining") or worker.busy_with == "close":
        return
    is_ready = worker.state == "ready"
    if is_ready and goal.serving[0] not in worker.loaded:
        yield WorkerStep("close", worker)  # it was joining when the version changed: it joins again
        return
    for version, accepts in worker.replicas.items():
        if accepts and not (is_ready and version in goal.serving):
            yield WorkerStep("drain", worker, version)
    if not is_ready:
        if not worker.replicas:
            yield WorkerStep("close", worker)
        return
    if worker.slot.stage is not None:
        for version in goal.serving:
            if version in worker.loaded and version not in worker.replicas:
                yield WorkerStep("activate", worker, version)
    kept = {*goal.serving, *worker.replicas, worker.busy_with, goal.loading and goal.loading.version}
    for version in sorted(worker.loaded - kept):
        yield WorkerStep("unload", worker, version)


def _load(loading: Loading, placement: Placement, steps: Steps, now_s: float) -> None:
    """Add the steps of loading a version: which workers load it now, the switch to it, or the end of the attempt."""
    version, ready = loading.version, placement.ready()
    if loading.losses >= _MAX_LOSSES:
        steps.now.append(GiveUp(f"{loading.losses} workers in a row were lost while they loaded it"))
        return
    stages = range(placement.num_stages)
    missing = [stage for stage in stages if not any(version in worker.loaded for worker in placement.ready(stage))]
    if not missing and all(version in worker.loaded for worker in ready):
        steps.now.append(Switch(version))
        return
    if steps.at(loading.give_up_s, now_s):
        where = f"no worker of stage {missing[0]} has" if missing else "a worker has not"
        steps.now.append(GiveUp(f"{where} loaded it in time"))
        return
    if any(version not in worker.loaded for worker in ready) and not steps.at(loading.retry_s, now_s):
        return
    busy = [worker for worker in placement.workers() if worker.busy_with == version]
    busy_hosts, busy_stages = {each.request.host for each in busy}, {each.slot.stage for each in busy}
    proven = {each.slot.stage for each in ready if version in each.loaded}
    for worker in ready:
        stage, host = worker.slot.stage, worker.request.host
        if version in worker.loaded or worker.busy_with is not None or host in busy_hosts:
            continue
        if stage in proven or stage not in busy_stages:
            busy_hosts.add(host)
            busy_stages.add(stage)
            steps.now.append(WorkerStep("load", worker, version))


def _fill(goal: Goal, placement: Placement, steps: Steps, now_s: float) -> None:
    """Promote spares into free slots, and reassign a worker to the stage that lacks one."""
    spares = sorted(
        (slot for slot in placement.of_stage(None) if slot.worker is not None and slot.ready),
        key=lambda slot: slot.worker.name if slot.worker else "",
    )
    if spares:
        for stage in sorted(range(placement.num_stages), key=lambda stage: len(placement.ready(stage))):
            staying = (slot for slot in placement.of_stage(stage) if slot.free and RemoveSlot(slot) not in steps.now)
            if free := next(staying, None):
                steps.now.append(Promote(spares[0], free))  # the next one depends on this one
                return
    if any(worker.state == "draining" or worker.busy_with == "restart" for worker in placement.workers()):
        return
    stages = range(placement.num_stages)
    fewest = min(stages, key=lambda stage: (placement.num_workers(stage) > 0, placement.surplus(stage)))
    count = placement.num_workers(fewest)
    most = max(stages, key=placement.surplus if count else placement.num_workers)
    candidates = placement.ready(most)
    settled_s = max(goal.moved_s, goal.settle_until_s)
    if count and placement.surplus(fewest) >= 0:
        is_quiet = goal.loading is None and goal.restart is None and placement.fully_replicated
        if is_quiet and (move := _missing_spare(placement) or _separation(placement)) is not None:
            changed_s = max(worker.since_s for worker in placement.workers())
            if steps.at(max(settled_s, changed_s) + BALANCE_AFTER_S, now_s):
                steps.now.append(move)
        return
    if len(candidates) < (placement.replicas[most] + 1 if count else 2):
        return
    lost_s = [slot.worker.since_s for slot in placement.of_stage(fewest) if slot.worker is not None and slot.free]
    if steps.at(max([*lost_s, settled_s]) + (BALANCE_AFTER_S if count else REASSIGN_AFTER_S), now_s):

        def gain(worker: Worker) -> list[tuple[int, int]]:
            """Prefer a host without the stage that lacks a replica, then one with several replicas of the other, then such a GPU."""
            return [(-placement.count(fewest, place), placement.count(most, place)) for place in worker.request.places]

        steps.now.append(WorkerStep("move", max(candidates, key=gain)))


def _missing_spare(placement: Placement) -> WorkerStep | None:
    """A replica more than its stage needs joins again as a spare if one is missing."""
    if placement.num_extra(None) >= placement.spares_wanted:
        return None
    stages = (stage for stage in range(placement.num_stages) if placement.surplus(stage) > 0)
    extra = (worker for stage in stages for worker in placement.ready(stage))
    return next((WorkerStep("move", worker) for worker in extra), None)


def _separation(placement: Placement) -> WorkerStep | None:
    """The first half of an exchange that separates two replicas of a stage, because a host or a GPU may fail as a whole.

    The worker goes from its stage in a crowded place to another stage, which the place lacks and of which another place can give a replica
    in return. Then the former stage lacks a replica, and the other one has one too many. No exchange reduces the number of places of a
    stage. GPUs exchange within their host, which changes nothing for hosts.

    With spares there is no exchange: a spare would take the free place wherever it is, and the exchange would be repeated without end.
    """
    if placement.spares_wanted:
        return None
    stages = range(placement.num_stages)
    for level in range(2):  # hosts, then GPUs
        placed = [Counter(each.request.places[level] for each in placement.workers(stage)) for stage in stages]
        giving = [{each.request.places for each in placement.ready(stage)} for stage in stages]
        for worker in placement.ready():
            stage, here = worker.slot.stage, worker.request.places
            if stage is None or placed[stage][here[level]] < 2:
                continue
            for other in stages:
                if not placed[other][here[level]] and any(
                    each[level] not in placed[stage] and each[:level] == here[:level] for each in giving[other]
                ):
                    return WorkerStep("move", worker, stage=other)
    return None
