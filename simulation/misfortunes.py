"""What each misfortune does."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from server.scheduler import BatchDone, BatchFailed, Event, LinkBroken, LinkDraining, LinkReady, RequestCancelled
from simulation.injections import Strike
from simulation.scenario import Fault
from simulation.workers import HEARTBEAT_TIMEOUT_S, Worker

if TYPE_CHECKING:
    from simulation.simulator import Simulator

_SINGLE = ("kill", "freeze", "stop", "slow", "flap", "sour", "cut_to", "cut_from", "cut", "leave", "vanish", "move")


def strike(simulator: Simulator, injection: Strike) -> bool:
    """Let it happen. False if it had no effect: the worker is not there, or cannot be spared."""
    worker, random = simulator.workers.get(injection.worker), Random(injection.salt)
    if worker is not None and injection.down_s is not None:
        worker.kill(injection.down_s)
        return True
    return worker is not None and _strike(simulator, worker, injection.fault, random)


def _strike(simulator: Simulator, worker: Worker, fault: Fault, random: Random) -> bool:
    match fault:
        case "pair":
            return _strike_pair(simulator, worker)
        case "double":
            others = [each for each in simulator.workers.values() if each is not worker]
            pair = (worker, *random.sample(others, min(1, len(others))))
            return sum(_strike_one(each, random.choice(_SINGLE), random) for each in pair) > 0
        case "blackout":
            return _black_out(simulator, worker)
        case "upgrade":
            return _upgrade(simulator, worker)
        case "garbage":
            simulator.deliver(_garbage(simulator, random))
        case "mass_cancel":
            for request in list(simulator.open)[::2]:
                simulator.cancel(request)
        case _:
            return _redundant(simulator, worker) and _strike_one(worker, fault, random)
    return True


def _strike_one(worker: Worker, fault: str, random: Random) -> bool:
    if not worker.serving:
        return False
    match fault:
        case "kill":
            worker.kill()
        case "freeze":
            worker.freeze()
        case "stop":
            worker.stop()
        case "slow":
            worker.slow_down(random.choice((3.0, 10.0, 30.0)), random.uniform(0.5, 5.0))
        case "flap":
            worker.flap(random.uniform(0.5, 5.0))
        case "sour":
            worker.turn_sour(random.uniform(0.5, 5.0))
        case "cut_to" | "cut_from" | "cut":
            lasts_s = random.uniform(0.0, 2 * HEARTBEAT_TIMEOUT_S)
            worker.cut_off(lasts_s, to=fault != "cut_from", from_=fault != "cut_to")
        case "leave":
            worker.leave()
        case "vanish":
            worker.die("left", 0.0)
        case "move":
            worker.leave()
            worker.stage = random.randrange(worker.num_stages)
    return True


def _strike_pair(simulator: Simulator, worker: Worker) -> bool:
    """One of each of two stages dies; every stage keeps a replica."""
    others = [each for each in simulator.workers.values() if each.stage != worker.stage]
    other = next((each for each in others if _redundant(simulator, each)), None)
    if other is None or not _redundant(simulator, worker) or not (worker.serving and other.serving):
        return False
    worker.kill()
    other.kill()
    return True


def _black_out(simulator: Simulator, worker: Worker) -> bool:
    """All replicas of the stage die. Where nothing may be lost, only if everybody else is well."""
    if not simulator.scenario.permits and not all(_well(each) for each in simulator.workers.values()):
        return False
    for each in [each for each in simulator.workers.values() if each.stage == worker.stage]:
        each.kill()
    return True


def _redundant(simulator: Simulator, worker: Worker) -> bool:
    """Where nothing may be lost, one of several replicas fails at a time."""
    if simulator.scenario.permits:
        return True
    others = [each for each in simulator.workers.values() if each.stage == worker.stage and each is not worker]
    return bool(others) and all(_well(each) for each in others)


def _well(worker: Worker) -> bool:
    return worker.serving and not worker.leaving


def _upgrade(simulator: Simulator, worker: Worker) -> bool:
    """One worker after the other goes over to the next version, none while its stage would be left without."""
    newest = max(each.version for each in simulator.workers.values())
    if all(each.version == newest for each in simulator.workers.values()):
        newest += 1
    fleet = [each for each in simulator.workers.values() if _well(each)]
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
        # That incarnation may be alive: nothing false may be said of it, but the same thing twice.
        return LinkReady(link, worker.stage, f"v{worker.version}") if worker.serving else RequestCancelled(0)
    events: list[Event] = [
        BatchDone(batch, link),
        BatchFailed(batch, link, "late"),
        LinkBroken(link, "exit"),
        LinkDraining(link),
        RequestCancelled(random.randrange(1, 1_000_000)),
    ]
    event = random.choice(events)
    return RequestCancelled(0) if isinstance(event, RequestCancelled) and event.request in simulator.open else event
