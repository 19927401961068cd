"""The connection to a Ray cluster, its nodes, and the actors of a service on it."""

import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, get_placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from multiworld_serving.common.config.addresses import parse_address
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.deploy.processes.programs import Role
from multiworld_serving.deploy.ray.actor import ProcessActor, ProcessSpec
from multiworld_serving.deploy.ray.placement import Resources

GROUP = "multiworld"
"""Name of the placement group, in the namespace of the service."""
ROLES: tuple[Role, ...] = ("frontend", "leader", "worker")
"""In the order in which they stop: frontends answer their requests first."""
_PROBE_S = 5.0
"""Longest wait for a connection to the head."""
_ADVICE = "start one with `ray start --head`, run this command on one of its nodes, or set RAY_ADDRESS to HOST:PORT of its head"
_GONE_S = 15.0
"""Longest wait until Ray has forgotten actors that were killed."""
_POLL_S = 0.25


@contextlib.contextmanager
def connected(namespace: str) -> Iterator[None]:
    """Be connected to the cluster of RAY_ADDRESS, else that of this machine, while the block runs. Raises UserError if there is none.

    Args:
        namespace: in which actors are created and found.
    """
    _probe()
    # Ray warns that actors of a removed placement group cannot run again; ours are stopped before it is removed.
    logging.getLogger("ray.actor").setLevel(logging.ERROR)
    try:
        ray.init(address="auto", namespace=namespace, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"cannot connect to the Ray cluster: {str(error).splitlines()[0]}; {_ADVICE}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _probe() -> None:
    """Raise UserError unless something listens at the head's address. `ray.init` would wait for it without a limit."""
    try:
        head = parse_address(ray._private.services.canonicalize_bootstrap_address("auto") or "")
    except ConnectionError as error:
        raise UserError(f"there is no Ray cluster on this machine; {_ADVICE}") from error
    except ValueError as error:
        raise UserError("RAY_ADDRESS must be HOST:PORT of the head of a Ray cluster") from error
    try:
        socket.create_connection(head, timeout=_PROBE_S).close()
    except OSError as error:
        raise UserError(f"nothing answers at {head}: {error}; {_ADVICE}") from error


def free_resources() -> list[Resources]:
    """What each node that is alive has free."""
    found: Mapping[str, Mapping[str, float]] = ray._private.state.available_resources_per_node()
    free = [found.get(node["NodeID"], {}) for node in ray.nodes() if node["Alive"]]
    return [Resources(each.get("CPU", 0.0), int(each.get("GPU", 0))) for each in free]


def answers(asked: Mapping[str, "ray.ObjectRef[Any]"], timeout_s: float) -> dict[str, Any]:
    """What actors or tasks answer within this time, without those that fail or do not answer."""
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
    found = {}
    for name, answer in asked.items():
        with contextlib.suppress(ray.exceptions.RayError):  # a GetTimeoutError is a RayError
            found[name] = ray.get(answer, timeout=0)
    return found


def create(spec: ProcessSpec, group: PlacementGroup, bundle: int) -> None:
    """Create the actor of a process in a bundle of the placement group."""
    ray.remote(ProcessActor).options(
        name=spec.name,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=spec.need.cores,
        num_gpus=spec.need.gpus,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
    ).remote(spec)


def running_actors(*roles: str) -> dict[str, ActorHandle]:
    """The actors of these roles in this namespace, by name."""
    found = {}
    for name in ray.util.list_named_actors():
        if name.partition("-")[0] in roles:
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
