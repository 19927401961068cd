"""Faults on the containers of a Compose project, including those of the leaders."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from multiworld_serving.testing.chaos.faults.fault import PARTITION_CAUSES, WAIT_S, Fault, FaultContext
from tests.containers.project import ComposeProject, Container

MORE_WORKERS = 2
WORKERS_UP = 'sum(up{job="multiworld-worker"})'
Down = Callable[[Container], AbstractContextManager[None]]
"""Takes a container down while a block runs."""


def _project(context: FaultContext) -> ComposeProject:
    assert isinstance(context.system, ComposeProject)
    return context.system


def _take_down(context: FaultContext, down: Down) -> None:
    """Take the container of a worker down until the leader has detected it and Prometheus has scraped that."""
    (target,), project = context.targets, _project(context)
    container = project.container(str(target.worker))
    context.begin()
    with down(container):
        context.wait_broken()
        project.prometheus.wait_for(f'multiworld_world_up{{stage="{target.stage}",replica="{target.slot}"}} == 0')


def _restart_workers(context: FaultContext) -> None:
    services = {_project(context).container(str(target.worker)).service for target in context.targets}
    context.begin()
    _project(context).compose("restart", *sorted(services))


def _scale(context: FaultContext) -> None:
    """Start more workers, then as many as before."""
    project, before = _project(context), context.observer.now
    service = project.container(str(next(iter(before.replicas.values())).worker)).service
    count = len(project.containers(service))
    context.begin()
    try:
        _scale_to(project, service, count + MORE_WORKERS)
        context.observer.wait(lambda now: now.ready >= before.ready + MORE_WORKERS, WAIT_S, "scaled up")
        project.prometheus.wait_for(f"{WORKERS_UP} == {count + MORE_WORKERS}")
    finally:
        _scale_to(project, service, count)
    context.observer.wait(lambda now: len(now.replicas) == len(before.replicas), WAIT_S, "scaled down")


def _scale_to(project: ComposeProject, service: str, count: int) -> None:
    project.compose("up", "--detach", "--no-recreate", "--no-deps", "--scale", f"{service}={count}", service)


def _take_leaders_down(context: FaultContext, down: Down) -> None:
    """Take each leader down in turn, until the frontend has lost it and Prometheus has scraped that. The next one when all are ready."""
    project = _project(context)
    context.begin()
    for leader in project.leaders:
        with down(leader):
            context.observer.wait(lambda now: not now.leaders_ready, WAIT_S, "lost by the frontend")
            project.prometheus.wait_for("multiworld_leaders == 1")
        context.observer.wait(lambda now: now.leaders_ready, WAIT_S, "served by all leaders again")


def _of_leaders(name: str, down: Down) -> Fault:
    return Fault(name, "", "leader", partial(_take_leaders_down, down=down))


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("container-kill", "", "one", partial(_take_down, down=Container.killed), {"exit"}),
        Fault("container-pause", "", "one", partial(_take_down, down=Container.paused), {"hang"}),
        Fault("unplug", "", "one", partial(_take_down, down=Container.unplugged), PARTITION_CAUSES),
        Fault("restart-workers", "", "all", _restart_workers, {"left"}),
        Fault("scale", "", "none", _scale),
        _of_leaders("leader-kill", Container.killed),
        _of_leaders("leader-unplug", Container.unplugged),
    )
}
"""By name."""
