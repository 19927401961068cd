"""Faults on leaders and frontends of a local service. Each round has another victim.

No request fails when a leader is lost: frontends send it to another leader, or keep it until one has started.
"""

import signal

from multiworld_serving.testing.chaos.faults.fault import CONNECTION_LOST, HOLD_S, FaultContext, fault
from multiworld_serving.testing.chaos.system import network

_HELD = f"until the frontends detect it and {HOLD_S:g} s more"


@fault("leader-kill", "SIGKILL of one leader", "leader")
def _kill_leader(context: FaultContext) -> None:
    with context.child("leader") as leader:
        leader.send(signal.SIGKILL)
        context.wait_leader_lost(leader.pid)


@fault("leader-freeze", f"SIGSTOP of one leader {_HELD}, then SIGCONT", "leader")
def _freeze_leader(context: FaultContext) -> None:
    """Shorter than the supervisor waits before it kills a blocked leader, so the same process goes on and answers late."""
    with context.child("leader") as leader, leader.stopped():
        context.wait_leader_lost(leader.pid)
        context.hold(HOLD_S)


@fault(
    "leader-cut",
    f"packets to and from one leader are dropped {_HELD}",
    "leader",
    unavailable_reason=network.packet_loss_unavailable_reason,
)
def _cut_leader(context: FaultContext) -> None:
    with context.child("leader") as leader:
        connections = leader.connections_as_client()
        with network.drop_packets(connections):
            context.wait_leader_lost(leader.pid)
            context.hold(HOLD_S)


@fault("frontend-kill", "SIGKILL of one frontend", "frontend", excused=CONNECTION_LOST)
def _kill_frontend(context: FaultContext) -> None:
    with context.child("frontend") as frontend:
        frontend.send(signal.SIGKILL)
        context.wait_frontend_replaced(frontend.pid)


@fault("frontend-freeze", "SIGSTOP of one frontend until the supervisor kills it", "frontend", excused=CONNECTION_LOST)
def _freeze_frontend(context: FaultContext) -> None:
    with context.child("frontend") as frontend, frontend.stopped():
        context.wait_frontend_replaced(frontend.pid)
