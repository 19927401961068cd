"""Faults on containers, including those of the leaders."""

from collections.abc import Iterator
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
_HELD = f"until the leader detects it and {HOLD_S:g} s more"
_container_fault = partial(fault, of="container", unavailable_reason=docker_unavailable_reason)


@_container_fault("container-kill", "docker kill, and docker start", causes=EXIT_CAUSES)
def _kill(context: FaultContext) -> None:
    container = context.container(context.targets[0])
    context.begin()
    with container.killed():
        context.wait_broken()


@_container_fault("container-pause", f"docker pause {_HELD}, and docker unpause", causes=HANG_CAUSES)
def _pause(context: FaultContext) -> None:
    container = context.container(context.targets[0])
    context.begin()
    with container.paused():
        context.wait_broken()
        context.hold(HOLD_S)


@_container_fault(
    "unplug",
    f"disconnected from its networks {_HELD}, then reconnected with other addresses",
    causes=PARTITION_CAUSES,
)
def _unplug(context: FaultContext) -> None:
    container = context.container(context.targets[0])
    context.begin()
    with container.unplugged():
        context.wait_broken()
        context.hold(HOLD_S)


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


@_container_fault(
    "leader-kill",
    f"docker kill of each leader in turn, and docker start {HOLD_S:g} s later",
    "leader",
    excused=NOT_SERVED,
)
def _kill_leader(context: FaultContext) -> None:
    for leader in _leaders(context):
        with leader.killed():
            context.hold(HOLD_S)


@_container_fault(
    "leader-pause",
    f"docker pause of each leader in turn, and docker unpause {PAUSE_S:g} s later",
    "leader",
    excused=NOT_SERVED,
)
def _pause_leader(context: FaultContext) -> None:
    for leader in _leaders(context):
        with leader.paused():
            context.hold(PAUSE_S)


@_container_fault("leader-restart", "docker compose restart of each leader in turn", "leader", excused=NOT_SERVED)
def _restart_leader(context: FaultContext) -> None:
    for leader in _leaders(context):
        context.project.compose("restart", leader.service)


@_container_fault(
    "leader-unplug",
    f"each leader in turn disconnected from its networks, and reconnected with other addresses {PAUSE_S:g} s later",
    "leader",
    excused=NOT_SERVED,
)
def _unplug_leader(context: FaultContext) -> None:
    for leader in _leaders(context):
        with leader.unplugged():
            context.hold(PAUSE_S)


def _leaders(context: FaultContext) -> Iterator[Container]:
    """Yield each leader. Waits after each until it was lost and all leaders are ready again."""
    context.begin()
    for leader in context.project.leaders:
        seen = len(context.observer.snapshots)
        yield leader
        context.wait_leader_back(seen)
