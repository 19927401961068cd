"""Faults on worker processes."""

import signal
from functools import partial

from multiworld_serving.testing.chaos.faults.fault import HOLD_S, PARTITION_CAUSES, FaultContext, fault
from multiworld_serving.testing.chaos.system import network

STAGE_STOPPED_S = 5.0
SLOW_S = 4.0
SLOW_SHARE = 0.1
MEMORY_S = 3.0


@fault("all", "SIGKILL of every worker", "all", causes={"exit"})
@fault("stage", "SIGKILL of all replicas of a stage", "stage", causes={"exit"})
@fault("kill", "SIGKILL", causes={"exit"})
def _kill(context: FaultContext) -> None:
    context.signal(signal.SIGKILL)


@fault("freeze", f"SIGSTOP until the leader detects it and {HOLD_S:g} s more, then SIGCONT", causes={"hang"})
def _freeze(context: FaultContext) -> None:
    with context.stopped():
        context.wait_broken()
        context.hold(HOLD_S)


@fault("pause", "SIGSTOP for half the heartbeat timeout")
def _pause(context: FaultContext) -> None:
    with context.stopped():
        context.hold(context.heartbeat_timeout_s / 2)


@fault("leave", "SIGTERM: the worker leaves", causes={"left"})
def _leave(context: FaultContext) -> None:
    context.signal(signal.SIGTERM)


@fault("slow", f"throttled to {SLOW_SHARE:.0%} CPU time for {SLOW_S:g} s")
def _slow(context: FaultContext) -> None:
    with context.processes() as processes:
        processes[0].throttle(SLOW_S, share=SLOW_SHARE)


@fault(
    "reset",
    "its TCP connections are reset",
    causes=PARTITION_CAUSES,
    unavailable_reason=network.reset_unavailable_reason,
)
def _reset(context: FaultContext) -> None:
    with context.processes() as processes:
        for process in processes:
            network.destroy_connections(process.connections())


def _cut(context: FaultContext, direction: network.Direction) -> None:
    with context.processes() as processes:
        connections = [connection for process in processes for connection in process.connections()]
    with network.drop_packets(connections, direction):
        context.wait_broken()
        context.hold(HOLD_S)


_cut_fault = partial(fault, causes=PARTITION_CAUSES, unavailable_reason=network.packet_loss_unavailable_reason)
_cut_fault("cut", "packets to and from it are dropped, then restored")(partial(_cut, direction="both"))
_cut_fault("cut-from", "packets from it are dropped, then restored")(partial(_cut, direction="from"))
_cut_fault("cut-to", "packets to it are dropped, then restored")(partial(_cut, direction="to"))


@fault("memory", f"SIGSTOP until detected, then no memory allocation for {MEMORY_S:g} s", causes={"hang"})
def _memory(context: FaultContext) -> None:
    """A serving worker allocates no memory: it warmed up with the largest batch. One that joins again may need some, and waits for it."""
    with context.processes() as processes, processes[0].without_memory():
        with context.stopped():
            context.wait_broken()
        context.hold(MEMORY_S)


@fault("flap", "SIGKILL three times, each as soon as the slot is ready", causes={"exit"})
def _flap(context: FaultContext) -> None:
    """Kill the worker three times, each time as soon as its slot is ready again."""
    targets = list(context.targets)
    for left in (2, 1, 0):
        context.signal(signal.SIGKILL, targets)
        context.wait_broken(targets)
        if left:
            now = context.wait_complete()
            targets = [now.replicas[target.key] for target in targets]


@fault("kill-joining", "SIGKILL, and SIGKILL of its successor while it joins", causes={"exit", "aborted"})
def _kill_joining(context: FaultContext) -> None:
    """Kill the worker, and its successor while it joins, receives weights or warms up."""
    (target,) = context.targets
    context.signal(signal.SIGKILL)
    context.wait_broken()
    successor = context.wait_rejoining(target)
    if successor.worker != target.worker:  # a spare, which does not join
        return
    if successor.ready:
        context.unexpected.append("the successor was ready before it could be killed while joining")
    context.signal(signal.SIGKILL, [successor])
    context.wait_broken([successor])


@fault("two", "one worker in each of two stages: one killed, one stopped", "two", causes={"exit", "hang"})
def _two(context: FaultContext) -> None:
    """Kill one target and stop the other at the same time."""
    killed, frozen = context.targets
    with context.stopped([frozen]):
        context.signal(signal.SIGKILL, [killed])
        context.wait_broken()


@fault("stage-stopped", f"SIGSTOP of all replicas of a stage for {STAGE_STOPPED_S:g} s", "stage", causes={"hang"})
def _stage_stopped(context: FaultContext) -> None:
    with context.stopped():
        context.hold(STAGE_STOPPED_S)
