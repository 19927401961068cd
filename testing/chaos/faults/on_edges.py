"""Faults on data edges: between the workers of two stages, and at the moments at which a tensor is on its way."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from functools import partial

from multiworld_serving.testing.chaos.faults.fault import HOLD_S, FaultContext, fault
from multiworld_serving.testing.chaos.system import network
from multiworld_serving.testing.chaos.system.processes import Connection, SystemProcess


def connections_between(one: Sequence[Connection], other: Sequence[Connection]) -> list[Connection]:
    """Those of the first process's connections whose other end is the second process."""
    ends = {(each.local_host, each.local_port, each.remote_host, each.remote_port) for each in other}
    return [each for each in one if (each.remote_host, each.remote_port, each.local_host, each.local_port) in ends]


def _edges(processes: Sequence[SystemProcess]) -> list[Connection]:
    one, other = processes
    return connections_between(one.connections(), other.connections())


@fault(
    "edge-reset",
    "TCP connections between two workers are reset",
    "two",
    unavailable_reason=network.reset_unavailable_reason,
)
def _reset(context: FaultContext) -> None:
    with context.processes() as processes:
        network.destroy_connections(_edges(processes))


@fault(
    "edge-cut",
    f"packets between two workers are dropped for {HOLD_S:g} s",
    "two",
    unavailable_reason=network.packet_loss_unavailable_reason,
)
def _cut(context: FaultContext) -> None:
    with context.processes() as processes, network.drop_packets(_edges(processes)):
        context.hold(HOLD_S)


def _kill_while_stopped(context: FaultContext, *, kills_reader: bool) -> None:
    """Kill a worker while one of another stage is stopped for half the heartbeat timeout, so that it lives.

    The reader waits for a producer that does not send. The outputs of the holder are on the way to a consumer that does not read.
    """
    stopped, killed = sorted(context.targets, key=lambda target: target.stage, reverse=not kills_reader)
    with context.stopped([stopped]):
        context.hold(context.heartbeat_timeout_s / 4)
        context.signal(signal.SIGKILL, [killed])
        context.hold(context.heartbeat_timeout_s / 4)
    context.wait_broken([killed])


_STOPPED = "a worker stops for half the heartbeat timeout, and a worker of another stage"
fault("kill-holder", f"{_STOPPED}, whose outputs it needs, gets SIGKILL", "two", causes=None)(
    partial(_kill_while_stopped, kills_reader=False)
)
fault("kill-reader", f"{_STOPPED}, which fetches from it, gets SIGKILL", "two", causes=None)(
    partial(_kill_while_stopped, kills_reader=True)
)
