"""Faults on containers, including those of the leaders."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

from multiworld_serving.testing.chaos.faults.context import WAIT_S, FaultContext
from multiworld_serving.testing.chaos.faults.fault import (
    EXIT_CAUSES,
    HANG_CAUSES,
    HOLD_S,
    LEFT_CAUSES,
    NOT_SERVED,
    PARTITION_CAUSES,
    fault,
)
from multiworld_serving.testing.chaos.system.containers import Container, docker_unavailable_reason

PAUSE_S = 4.0
"""How long a leader is paused or disconnected: longer than the heartbeat timeout."""
MORE_WORKERS = 2
Down = Callable[[Container], AbstractContextManager[None]]
"""Takes a container down while a block runs."""
_HELD = f"until the leader detects it and {HOLD_S:g} s more"
_container_fault = partial(fault, of="container", unavailable_reason=docker_unavailable_reason)


def _take_down(context: FaultContext, down: Down, hold_s: float = HOLD_S) -> None:
    """Take the container of a worker down until the leader has detected it, and longer."""
    container = context.container(context.targets[0])
    context.begin()
    with down(container):
        context.wait_broken()
        context.hold(hold_s)


_container_fault("container-kill", "docker kill, and docker start", causes=EXIT_CAUSES)(
    partial(_take_down, down=Container.killed, hold_s=0.0)
)
_container_fault("container-pause", f"docker pause {_HELD}, and docker unpause", causes=HANG_CAUSES)(
    partial(_take_down, down=Container.paused)
)
_container_fault(
    "unplug",
    f"disconnected from its networks {_HELD}, then reconnected with other addresses",
    causes=PARTITION_CAUSES,
)(partial(_take_down, down=Container.unplugged))


@_container_fault("restart-workers", "docker compose restart of all workers", "all", causes=LEFT_CAUSES)
def _restart_workers(context: FaultContext) -> None:
    services = {context.container(target).service for target in context.targets}
    context.begin()
    context.project.compose("restart", *sorted(services))


@_container_fault("scale", f"docker compose up --scale: {MORE_WORKERS} more workers, then as before", "none")
def _scale(context: FaultContext) -> None:
    before = context.observer.now
    service = context.container(next(iter(before.replicas.values()))).service
    count = len(context.project.containers(service))
    context.begin()
    try:
        _scale_to(context, service, count + MORE_WORKERS)
        context.observer.wait(lambda now: now.ready >= before.ready + MORE_WORKERS, WAIT_S, "scaled up")
        context.hold(HOLD_S)
    finally:
        _scale_to(context, service, count)
    context.observer.wait(lambda now: len(now.replicas) == len(before.replicas), WAIT_S, "scaled down")


def _scale_to(context: FaultContext, service: str, count: int) -> None:
    context.project.compose("up", "--detach", "--no-recreate", "--no-deps", "--scale", f"{service}={count}", service)


# The faults of leaders: each leader in turn, the next one after the previous one is ready again.

_leader_fault = partial(_container_fault, scope="leader", excused=NOT_SERVED)


def _take_leaders_down(context: FaultContext, down: Down, hold_s: float = PAUSE_S) -> None:
    for leader in _leaders(context):
        with down(leader):
            context.hold(hold_s)


_leader_fault("leader-kill", f"docker kill of each leader in turn, and docker start {HOLD_S:g} s later")(
    partial(_take_leaders_down, down=Container.killed, hold_s=HOLD_S)
)
_leader_fault("leader-pause", f"docker pause of each leader in turn, and docker unpause {PAUSE_S:g} s later")(
    partial(_take_leaders_down, down=Container.paused)
)
_leader_fault(
    "leader-unplug",
    f"each leader in turn disconnected from its networks, and reconnected with other addresses {PAUSE_S:g} s later",
)(partial(_take_leaders_down, down=Container.unplugged))


@_leader_fault("leader-restart", "docker compose restart of each leader in turn")
def _restart_leader(context: FaultContext) -> None:
    for leader in _leaders(context):
        context.project.compose("restart", leader.service)


def _leaders(context: FaultContext) -> Iterator[Container]:
    """Yield each leader. Waits after each until it was lost and all leaders are ready again."""
    context.begin()
    for leader in context.project.leaders:
        seen = len(context.observer.snapshots)
        yield leader
        context.wait_leader_back(seen)
