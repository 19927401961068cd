"""The effect of each fault on the simulated cluster."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from multiworld_serving.server.leader.scheduling.events import (
    BatchDone,
    BatchFailed,
    Event,
    ReplicaDraining,
    ReplicaLost,
    ReplicaReady,
    RequestCancelled,
)
from tests.simulation.data_plane import FRONTENDS
from tests.simulation.workers import HEARTBEAT_TIMEOUT_S, Worker

if TYPE_CHECKING:
    from tests.simulation.simulator import Simulator

_MAX_EDGE_CUT_S = 2.0


def inject_fault(simulator: Simulator, fault: str, name: str, random: Random) -> bool:
    """Inject a fault at the worker with this name. Returns False if it had no effect, or if it could lose requests.

    Args:
        random: of the parameters of the fault: duration, slowdown, invalid event.
    """
    worker = simulator.workers[name]
    match fault:
        case "blackout":
            return _fail_stage(simulator, worker)
        case "upgrade":
            return _upgrade(simulator, worker)
        case "garbage":
            simulator.deliver(_garbage(simulator, random))
        case "cut_edges":
            _cut_edges(simulator, worker, random)
        case "mass_cancel":
            for request in list(simulator.open)[::2]:
                simulator.cancel(request)
        case _ if not (worker.serving and _redundant(simulator, worker)):
            return False
        case "kill":
            worker.kill()
        case "freeze":
            worker.freeze()
        case "kill_after_reply":
            worker.kill_after_reply()
        case "slow":
            worker.degrade(random.uniform(0.5, 5.0), slowdown=random.choice((3.0, 10.0, 30.0)))
        case "flap":
            worker.degrade(random.uniform(0.5, 5.0), flapping=True)
        case "raising":
            worker.degrade(random.uniform(0.5, 5.0), raising=True)
        case "cut":
            to, from_ = random.choice(((True, False), (False, True), (True, True)))
            worker.partition(random.uniform(0.0, 2 * HEARTBEAT_TIMEOUT_S), to=to, from_=from_)
        case "leave":
            worker.leave()
        case "vanish":
            worker.fail("left", 0.0)
        case _:
            raise ValueError(f"unknown fault {fault}")
    return True


def _cut_edges(simulator: Simulator, worker: Worker, random: Random) -> None:
    """Cut one edge of the worker or, rarely, all."""
    ends = [*FRONTENDS, *(each.name for each in simulator.workers.values() if each is not worker)]
    lasts_s = random.uniform(0.0, _MAX_EDGE_CUT_S)
    for end in ends if random.random() < 0.1 else [random.choice(ends)]:
        simulator.data_plane.cut(worker.name, end, lasts_s)


def _fail_stage(simulator: Simulator, worker: Worker) -> bool:
    """Kill all replicas of the stage. If the scenario allows no refusals, only while all other workers are healthy."""
    if not simulator.scenario.allowed_refusals and not all(_is_healthy(each) for each in simulator.workers.values()):
        return False
    for each in [each for each in simulator.workers.values() if each.stage == worker.stage]:
        each.kill()
    return True


def _redundant(simulator: Simulator, worker: Worker) -> bool:
    """Whether the worker may fail: if the scenario allows no refusals, all other replicas of its stage must be healthy."""
    if simulator.scenario.allowed_refusals:
        return True
    others = [each for each in simulator.workers.values() if each.stage == worker.stage and each is not worker]
    return bool(others) and all(_is_healthy(each) for each in others)


def _is_healthy(worker: Worker) -> bool:
    return worker.serving and not worker.leaving


def _upgrade(simulator: Simulator, worker: Worker) -> bool:
    """Move one worker to the next version, unless its stage would have no replica left."""
    newest = max(each.version for each in simulator.workers.values())
    if all(each.version == newest for each in simulator.workers.values()):
        newest += 1
    fleet = [each for each in simulator.workers.values() if _is_healthy(each)]
    stages = range(simulator.scenario.config.num_stages)
    complete = all(any(each.stage == stage and each.version == newest for each in fleet) for stage in stages)
    peers = [each for each in fleet if each.stage == worker.stage and each.version == worker.version]
    if worker not in peers or worker.version == newest or not (complete or len(peers) > 1):
        return False
    worker.leave()
    worker.version = newest
    return True


def _garbage(simulator: Simulator, random: Random) -> Event:
    link = random.choice([*simulator.workers_by_link, "never-was"])
    worker, batch = simulator.workers_by_link.get(link), random.randrange(1, 1000)
    if worker is not None and worker.link == link:
        # The link may be in use: only a duplicate of a true event is allowed.
        return ReplicaReady(link, worker.stage, f"v{worker.version}") if worker.serving else RequestCancelled(0)
    events: list[Event] = [
        BatchDone(batch, link),
        BatchFailed(batch, link, "late"),
        ReplicaLost(link, "exit"),
        ReplicaDraining(link),
        RequestCancelled(random.randrange(1, 1_000_000)),
    ]
    event = random.choice(events)
    return RequestCancelled(0) if isinstance(event, RequestCancelled) and event.request in simulator.open else event
