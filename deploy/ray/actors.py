"""The actors of a service: create, find and end them. Needs a connection to the cluster."""

import contextlib
import time
from collections.abc import Mapping

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, get_placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from multiworld_serving.deploy.processes.launcher import Resources, Role
from multiworld_serving.deploy.ray.actor import ProcessActor, ProcessSpec

GROUP = "multiworld"
"""Name of the placement group, in the namespace of the service."""
ROLES: tuple[Role, ...] = ("frontend", "leader", "worker")
"""In the order in which they stop: frontends answer their requests first."""
WORKER_STOP_S = 35.0
"""From SIGTERM to SIGKILL of a worker: until its leaders have rerouted its batches."""
_GONE_S = 15.0
"""Longest wait until Ray has forgotten actors that were killed."""
_POLL_S = 0.25


def create(spec: ProcessSpec, need: Resources, group: PlacementGroup | None = None, bundle: int = 0) -> None:
    """Create the actor of a process, in a bundle of the placement group, or else on a node that Ray chooses to spread actors."""
    resources = ray_resources(need)
    ray.remote(ProcessActor).options(
        name=spec.name,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=resources["CPU"],
        num_gpus=resources.get("GPU", 0),
        memory=resources.get("memory"),
        scheduling_strategy="SPREAD" if group is None else PlacementGroupSchedulingStrategy(group, bundle),
    ).remote(spec)


def ray_resources(need: Resources) -> dict[str, float]:
    """As Ray names them, without those of which nothing is needed."""
    named = {"CPU": need.cores, "GPU": float(need.gpus), "memory": float(need.memory_bytes)}
    return {name: amount for name, amount in named.items() if amount}


def running_actors() -> dict[str, ActorHandle]:
    """The actors of the service in this namespace, by name."""
    found = {}
    for name in ray.util.list_named_actors():
        if name.startswith(tuple(f"{role}-" for role in ROLES)):
            with contextlib.suppress(ValueError):  # it has ended meanwhile
                found[name] = ray.get_actor(name)
    return found


def kill(actors: Mapping[str, ActorHandle]) -> None:
    """End actors, and their processes with them, and wait until Ray has forgotten their names."""
    for actor in actors.values():
        ray.kill(actor, no_restart=True)
    deadline_s = time.monotonic() + _GONE_S
    while actors.keys() & set(ray.util.list_named_actors()) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def remove_group() -> bool:
    """Remove the placement group. Returns whether there was one."""
    try:
        remove_placement_group(get_placement_group(GROUP))
    except ValueError:
        return False
    return True
