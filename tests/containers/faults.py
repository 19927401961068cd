"""Faults on the containers of a Compose project, including those of the leaders."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from multiworld_serving.testing.chaos.campaign import choose_targets, inject
from multiworld_serving.testing.chaos.faults.fault import PARTITION_CAUSES, WAIT_S, Fault, FaultContext
from multiworld_serving.testing.chaos.journal import Injection
from multiworld_serving.testing.chaos.observer import Observer
from tests.containers.deployment import CLIENTS, HEARTBEAT_TIMEOUT_S, LEADERS, Deployment
from tests.containers.project import Container
from tests.waiting import wait_for_more

MORE_WORKERS = 2
WORKERS_UP = 'sum(up{job="multiworld-worker"})'


def _project(context: FaultContext) -> Deployment:
    assert isinstance(context.system, Deployment)
    return context.system


def _take_down(context: FaultContext, down: Callable[[Container], AbstractContextManager[None]]) -> None:
    """Take the container of a worker down until the leader has detected it and Prometheus has scraped that."""
    (target,), project = context.targets, _project(context)
    container = project.container(str(target.worker))
    context.begin()
    with down(container):
        context.wait_broken()
        project.prometheus.wait_for(f'multiworld_world_up{{stage="{target.stage}",replica="{target.slot}"}} == 0')


def _restart_workers(context: FaultContext) -> None:
    context.begin()
    _project(context).compose("restart", "worker")


def _scale(context: FaultContext) -> None:
    """Start more workers, then as many as before."""
    project, before = _project(context), context.observer.now
    count = len(project.containers("worker"))
    context.begin()
    try:
        _scale_to(project, count + MORE_WORKERS)
        context.observer.wait(lambda now: now.ready >= before.ready + MORE_WORKERS, WAIT_S, "scaled up")
        project.prometheus.wait_for(f"{WORKERS_UP} == {count + MORE_WORKERS}")
    finally:
        _scale_to(project, count)
    context.observer.wait(lambda now: len(now.replicas) == len(before.replicas), WAIT_S, "scaled down")


def _scale_to(project: Deployment, count: int) -> None:
    project.compose("up", "--detach", "--no-recreate", "--no-deps", "--scale", f"worker={count}", "worker")


def _unplug_leaders(context: FaultContext) -> None:
    """Unplug each leader in turn, until the frontend has lost it and Prometheus has scraped that. The next one when all are ready."""
    project = _project(context)
    context.begin()
    for leader in project.containers(*LEADERS):
        with leader.unplugged():
            context.observer.wait(lambda now: not now.leaders_ready, WAIT_S, "lost by the frontend")
            project.prometheus.wait_for("multiworld_leaders == 1")
        context.observer.wait(lambda now: now.leaders_ready, WAIT_S, "served by all leaders again")


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("container-kill", "", "one", partial(_take_down, down=Container.killed), {"exit"}),
        Fault("unplug", "", "one", partial(_take_down, down=Container.unplugged), PARTITION_CAUSES),
        Fault("restart-workers", "", "all", _restart_workers, {"left"}),
        Fault("scale", "", "none", _scale),
        Fault("leader-unplug", "", "leader", _unplug_leaders),
    )
}
"""By name."""


def hurt(deployment: Deployment, name: str) -> Injection:
    """Inject one fault under load, and wait until every slot is ready again. No request may be lost."""
    fault, requests = FAULTS[name], deployment.requests()
    with Observer(deployment.url) as observer:
        now = observer.wait(lambda now: now.complete, WAIT_S, "complete")
        targets = choose_targets(fault, now, random.Random(0))
        with deployment.load(requests) as load:
            wait_for_more(load.samples, CLIENTS)
            made = inject(fault, FaultContext(deployment, observer, targets, HEARTBEAT_TIMEOUT_S, requests[0]))
            wait_for_more(load.samples, 2 * CLIENTS)
    print(made)
    assert not made.unexpected, made.unexpected
    assert not load.failed, load.failed[:3]
    assert made.duplicates == 0
    return made
