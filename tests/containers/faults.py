"""Faults on the containers of a Compose project, including those of the leaders."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from multiworld_serving.testing.chaos.faults.context import WAIT_S, FaultContext
from multiworld_serving.testing.chaos.faults.fault import (
    EXIT_CAUSES,
    HANG_CAUSES,
    HOLD_S,
    LEFT_CAUSES,
    NO_CAUSES,
    PARTITION_CAUSES,
    Fault,
)
from tests.containers.project import ComposeProject, Container

LEADER_AWAY_S = 6.0
"""How long a leader is disconnected: longer than the heartbeat timeout."""
MORE_WORKERS = 2
Down = Callable[[Container], AbstractContextManager[None]]
"""Takes a container down while a block runs."""


def _project(context: FaultContext) -> ComposeProject:
    assert isinstance(context.system, ComposeProject)
    return context.system


def _take_down(context: FaultContext, down: Down, hold_s: float = HOLD_S) -> None:
    """Take the container of a worker down until the leader has detected it, and longer."""
    container = _project(context).container(str(context.targets[0].worker))
    context.begin()
    with down(container):
        context.wait_broken()
        context.hold(hold_s)


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
        context.hold(HOLD_S)
    finally:
        _scale_to(project, service, count)
    context.observer.wait(lambda now: len(now.replicas) == len(before.replicas), WAIT_S, "scaled down")


def _scale_to(project: ComposeProject, service: str, count: int) -> None:
    project.compose("up", "--detach", "--no-recreate", "--no-deps", "--scale", f"{service}={count}", service)


def _take_leaders_down(context: FaultContext, down: Down, hold_s: float) -> None:
    """Take each leader down in turn. Waits after each until it was lost and all leaders are ready again."""
    context.begin()
    snapshots = context.observer.snapshots
    for leader in _project(context).leaders:
        seen = len(snapshots)
        with down(leader):
            context.hold(hold_s)
        context.observer.wait(
            lambda now, since=seen: (  # type: ignore[misc]  # mypy does not infer the type of a default
                now.leaders_ready and not all(each.leaders_ready for each in snapshots[since:])
            ),
            WAIT_S,
            "lost by a leader and served by all leaders again",
        )


def _of_leaders(name: str, down: Down, hold_s: float) -> Fault:
    return Fault(name, "", "leader", partial(_take_leaders_down, down=down, hold_s=hold_s), NO_CAUSES)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("container-kill", "", "one", partial(_take_down, down=Container.killed, hold_s=0.0), EXIT_CAUSES),
        Fault("container-pause", "", "one", partial(_take_down, down=Container.paused), HANG_CAUSES),
        Fault("unplug", "", "one", partial(_take_down, down=Container.unplugged), PARTITION_CAUSES),
        Fault("restart-workers", "", "all", _restart_workers, LEFT_CAUSES),
        Fault("scale", "", "none", _scale, NO_CAUSES),
        _of_leaders("leader-kill", Container.killed, HOLD_S),
        _of_leaders("leader-unplug", Container.unplugged, LEADER_AWAY_S),
    )
}
"""By name."""
