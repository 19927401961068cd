"""Random failures against `reconcile`: its invariants hold at every step, and in the end everything serves."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from multiworld import Cause
from multiworld_serving.common.wire.join import JoinRequest
from multiworld_serving.server.leader.replicas.placement import Placement
from multiworld_serving.server.leader.replicas.reconcile import (
    GiveUp,
    Goal,
    Loading,
    Promote,
    RemoveSlot,
    Step,
    Switch,
    WorkerStep,
    reconcile,
)
from multiworld_serving.server.leader.replicas.worker import Ending, Worker

DISRUPTIVE = ("move", "restart")


class Cluster:
    """Worker processes on two hosts, or on two GPUs of one, which join, load, leave and are killed at random times.

    Steps have their effect at once or later.
    """

    def __init__(self, seed: int, one_host: bool) -> None:
        self.one_host = one_host
        self.random = random.Random(seed)
        self.now_s = 0.0
        stages, replicas, spares = self.random.randint(1, 3), self.random.randint(1, 3), self.random.randint(0, 1)
        self.placement = Placement([replicas] * stages, spares)
        self.goal = Goal((1,))
        self.timers: list[tuple[float, Callable[[], object]]] = []
        self.given_up = False
        self.keeps_none = self.random.random() < 0.5
        self.gone: set[int] = set()
        for number in range(stages * replicas + spares):
            self.after(self.random.random(), lambda number=number: self.join(number))  # type: ignore[misc]

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        self.timers.append((self.now_s + delay_s, call))

    def enter(self, worker: Worker, state: Any) -> None:
        worker.state, worker.since_s = state, self.now_s

    def join(self, number: int) -> None:
        if number in self.gone:
            return
        host, gpu = ("host", f"gpu-{number % 2}") if self.one_host else (f"host-{number % 2}", "")
        request = JoinRequest(f"w{number}", "cpu", host, 1, gpu=gpu)
        if host in self.goal.drained:
            self.after(1.0, lambda: self.join(number))
            return
        held = self.random.randrange(self.placement.num_stages)
        # In the beginning, as after the start of a leader, workers keep the stage that another leader has assigned.
        stage, destined = held, self.goal.destined.pop(f"w{number}", None)
        if self.now_s > 1 or self.keeps_none:
            stage = self.placement.choose_stage(request.places, {held}, destined=destined)
        slot = self.placement.free_slot(stage)
        generation = self.placement.next_generation(slot.id.name)
        worker = Worker(request, slot.id, generation)
        self.placement.take(slot, worker)
        self.enter(worker, "loading")
        version = self.goal.serving[0]

        def ready() -> None:
            if worker.state == "loading":
                worker.loaded.add(version)
                worker.ready_at_s = self.now_s
                self.enter(worker, "ready")

        self.after(self.random.uniform(0.1, 1.0), ready)

    def end(self, worker: Worker, cause: str) -> None:
        if worker.state == "broken":
            return
        self.enter(worker, "broken")
        self.placement.lose(worker)
        worker.ending = Ending(cause, "")
        worker.replicas.clear()
        if isinstance(worker.busy_with, int) and self.goal.loading is not None and cause != Cause.LEFT:
            self.goal.loading.lost(self.now_s)
        self.after(self.random.uniform(0.1, 1.5), lambda: self.join(int(worker.name[1:])))

    def settle(self) -> float | None:
        """Perform steps until there are none."""
        for _ in range(200):
            steps = reconcile(self.goal, self.placement, self.now_s)
            if not steps.now:
                return steps.wake_s
            for step in steps.now:
                self.perform(step)
        raise AssertionError(f"it does not settle: {steps.now}")

    def perform(self, step: Step) -> None:
        match step:
            case WorkerStep():
                self.check(step)
                if step.stage is not None:
                    self.goal.destined[step.worker.name] = step.stage
                self.perform_at(step.kind, step.worker, step.version)
            case Promote(spare, slot):
                self.placement.remove(spare)
                assert spare.worker is not None
                self.placement.take(slot, spare.worker)
            case RemoveSlot(slot):
                self.placement.remove(slot)
            case Switch(version):
                ready = [self.placement.ready(stage) for stage in range(self.placement.num_stages)]
                assert all(any(version in worker.loaded for worker in each) for each in ready)
                self.goal.serving, self.goal.loading = (version, *self.goal.serving), None
                self.after(1.0, self.retire)
            case GiveUp():
                self.goal.loading, self.given_up = None, True

    def retire(self) -> None:
        self.goal.serving = self.goal.serving[:1]

    def perform_at(self, kind: str, worker: Worker, version: int) -> None:
        match kind:
            case "activate":
                worker.replicas[version] = True
            case "drain":
                worker.replicas[version] = False
                self.after(self.random.uniform(0, 0.3), lambda: worker.replicas.pop(version, None))
            case "load":
                worker.busy_with = version
                self.after(self.random.uniform(0.2, 2.0), lambda: self.loaded(worker, version))
            case "unload":
                worker.loaded.discard(version)
            case "move":
                self.goal.moved_s = self.now_s
                self.enter(worker, "draining")
            case "restart":
                worker.busy_with = "restart"
                self.after(0.2, lambda: self.end(worker, Cause.LEFT))
            case "close":
                worker.busy_with = "close"
                self.after(0.01, lambda: self.end(worker, Cause.LEFT))

    def loaded(self, worker: Worker, version: int) -> None:
        if worker.state == "ready" and worker.busy_with == version:
            worker.busy_with = None
            worker.loaded.add(version)
            if self.goal.loading is not None:
                self.goal.loading.passed(self.now_s + 30)

    def check(self, step: WorkerStep) -> None:
        worker, others = step.worker, [each for each in self.placement.workers() if each is not step.worker]
        stage = worker.slot.stage
        if step.kind in DISRUPTIVE:
            assert not any(each.state == "draining" or each.busy_with == "restart" for each in others)
            if stage is not None and self.placement.replicas[0] > 1:
                assert any(each.state == "ready" for each in others if each.slot.stage == stage), step
        if step.kind == "load":
            assert self.goal.loading is not None
            assert self.now_s >= self.goal.loading.retry_s
            proven = any(step.version in each.loaded for each in others if each.slot.stage == stage)
            alone = not any(each.busy_with == step.version for each in others if each.slot.stage == stage)
            assert proven or alone, step

    def run(self, until_s: float, failures_s: float = 1e9) -> None:
        """Let time pass; a worker is killed every `failures_s` on average."""
        while self.now_s < until_s:
            wake_s = self.settle()
            kill_s = self.now_s + self.random.expovariate(1 / failures_s)
            due_s, call = min(self.timers, key=lambda timer: timer[0], default=(until_s, None))
            self.now_s = min(due_s, kill_s, until_s, wake_s or until_s)
            if call is not None and self.now_s == due_s:
                self.timers.remove((due_s, call))
                call()
            elif self.now_s == kill_s and (workers := list(self.placement.workers())):
                self.end(self.random.choice(workers), Cause.EXIT)


def is_spread(placement: Placement) -> bool:
    """Whether each stage is on both hosts, or on both GPUs of the only one."""
    return all(
        len({worker.request.places for worker in placement.ready(stage)}) == 2 for stage in range(placement.num_stages)
    )


@pytest.mark.parametrize("one_host", [False, True])
@pytest.mark.parametrize("seed", [*range(60), 1645, 2293])
def test_everything_serves_in_the_end_when_workers_are_killed_at_random(seed: int, one_host: bool) -> None:
    """A version is loaded and workers are restarted, while others are killed, some of them for good."""
    cluster = Cluster(seed, one_host)
    cluster.run(150)
    assert cluster.placement.fully_replicated
    may_spread = cluster.placement.replicas[0] == 2 and not cluster.placement.spares_wanted
    assert is_spread(cluster.placement) or not may_spread
    workers = [int(worker.name[1:]) for worker in cluster.placement.workers()]
    more = len(workers) - cluster.placement.num_stages * cluster.placement.replicas[0]
    assert len(cluster.placement.of_stage(None)) == min(cluster.placement.spares_wanted, more)
    spare = len(workers) - cluster.placement.num_stages
    cluster.goal.loading = Loading(2, cluster.now_s + 30)
    for _ in range(6):
        cluster.goal.restart = next(iter(cluster.placement.ready()), None)
        if len(cluster.gone) < spare and cluster.random.random() < 0.5:
            cluster.gone.add(gone := workers.pop())
            if (worker := cluster.placement.live_worker(f"w{gone}")) is not None:
                cluster.end(worker, Cause.EXIT)
        cluster.run(cluster.now_s + 3, failures_s=cluster.random.choice([1.0, 4.0, 1e9]))
    cluster.goal.restart = None
    cluster.run(cluster.now_s + 150)
    placement = cluster.placement
    assert is_spread(placement) or not may_spread or cluster.gone
    assert cluster.given_up or cluster.goal.serving == (2,)
    assert all(placement.ready(stage) for stage in range(placement.num_stages))
    assert placement.fully_replicated or cluster.gone
    assert {tuple(worker.loaded) for worker in placement.workers()} == {cluster.goal.serving}
    for stage in range(placement.num_stages):
        assert all(worker.replicas == {cluster.goal.serving[0]: True} for worker in placement.workers(stage))


@pytest.mark.parametrize("seed", range(30))
def test_workers_of_a_drained_host_leave_unless_their_stage_is_nowhere_else(seed: int) -> None:
    cluster = Cluster(seed, one_host=False)
    cluster.run(150)
    placement, stages = cluster.placement, range(cluster.placement.num_stages)
    elsewhere = [any(worker.request.host == "host-0" for worker in placement.ready(stage)) for stage in stages]
    cluster.goal.drained = frozenset({"host-1"})
    cluster.run(cluster.now_s + 30)
    assert all(placement.ready(stage) for stage in stages)
    if all(elsewhere):
        assert {worker.request.host for worker in placement.workers()} == {"host-0"}
    cluster.goal.drained = frozenset()
    cluster.run(cluster.now_s + 10)
    assert "host-1" in {worker.request.host for worker in placement.workers()} or placement.num_workers() == 1
