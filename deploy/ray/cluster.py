"""The connection to a Ray cluster, and what is checked before anything is started there."""

import contextlib
import importlib.metadata
import logging
import socket
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from multiworld_serving.common.config import UserError
from multiworld_serving.common.config.addresses import parse_address
from multiworld_serving.deploy.processes.launcher import Resources

_DISTRIBUTION = "multiworld-serving"
_PROBE_S = 5.0
"""Longest wait for a connection to the head, and for its first answer."""
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client of gRPC sends first, with empty settings (RFC 9113, section 3.4). The server sends its settings."""
_FRAME_HEADER_BYTES, _FRAME_TYPE, _SETTINGS = 9, 3, 4
_ADVICE = (
    "start one with `ray start --head`, run this command on one of its nodes, or give its HOST:PORT with --ray-address"
)
_VERSIONS_S = 60.0
"""Longest wait for the answers of all nodes; each starts a Python process."""


class Node(NamedTuple):
    """A node that is alive.

    Attributes:
        resources: all that it has, free or not.
    """

    id: str
    name: str
    resources: Resources


@contextlib.contextmanager
def connected(address: str, namespace: str) -> Iterator[None]:
    """Be connected to the cluster while the block runs. Raises UserError if nothing answers there.

    Args:
        address: "auto" for the cluster of this machine, or HOST:PORT of the head.
        namespace: in which actors are created and found.
    """
    _probe(address)
    # Ray warns that actors of a removed placement group cannot run again; ours are stopped before it is removed.
    logging.getLogger("ray.actor").setLevel(logging.ERROR)
    try:
        ray.init(address=address, namespace=namespace, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"cannot connect to {_at(address)}: {str(error).splitlines()[0]}; {_ADVICE}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _at(address: str) -> str:
    return "a Ray cluster on this machine" if address == "auto" else f"the Ray cluster at {address}"


def _probe(address: str) -> None:
    """Raise UserError unless the head answers like a gRPC server. `ray.init` would wait for it without a limit."""
    try:
        if address != "auto":
            parse_address(address)
        head = ray._private.services.canonicalize_bootstrap_address(address)
        host, port = parse_address(head)
    except ConnectionError as error:
        raise UserError(f"there is no Ray cluster on this machine; {_ADVICE}") from error
    except ValueError as error:
        raise UserError(f"--ray-address {address}: must be auto, or HOST:PORT of the head of a Ray cluster") from error
    try:
        with socket.create_connection((host, port), timeout=_PROBE_S) as connection:
            connection.settimeout(_PROBE_S)
            connection.sendall(_HTTP2_PREFACE)
            answer = connection.recv(_FRAME_HEADER_BYTES, socket.MSG_WAITALL)
    except OSError as error:
        raise UserError(f"nothing answers at {head}: {error}; {_ADVICE}") from error
    if len(answer) < _FRAME_HEADER_BYTES or answer[_FRAME_TYPE] != _SETTINGS:
        raise UserError(f"what answers at {head} is not the head of a Ray cluster; {_ADVICE}")


def nodes() -> list[Node]:
    """The nodes that are alive."""
    alive: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    return [Node(node["NodeID"], node["NodeName"], _resources(node["Resources"])) for node in alive]


def free_resources(found: list[Node]) -> list[Resources]:
    """What is free on each of these nodes."""
    free: Mapping[str, Mapping[str, float]] = ray._private.state.available_resources_per_node()
    return [_resources(free.get(node.id, {})) for node in found]


def _resources(found: Mapping[str, float]) -> Resources:
    return Resources(found.get("CPU", 0.0), int(found.get("GPU", 0)), int(found.get("memory", 0)))


def installed_version() -> str:
    """The version of this package on this node."""
    return importlib.metadata.version(_DISTRIBUTION)


def check_versions(found: list[Node]) -> None:
    """Raise UserError unless all nodes have the version of this package that this process has."""
    task = ray.remote(installed_version)
    refs = [
        task.options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False))
        for node in found
    ]
    answers = [ref.remote() for ref in refs]
    ray.wait(answers, num_returns=len(answers), timeout=_VERSIONS_S)
    versions = {node.name: _answer(answer) for node, answer in zip(found, answers, strict=True)}
    if wrong := different_versions(installed_version(), versions):
        raise UserError(wrong)


def _answer(answer: "ray.ObjectRef[str]") -> str:
    try:
        return str(ray.get(answer, timeout=0))
    except ray.exceptions.GetTimeoutError:
        return f"no answer within {_VERSIONS_S:g} s"
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if error.cause is not None else error
        missing = isinstance(cause, (ImportError, importlib.metadata.PackageNotFoundError))
        return "none" if missing or "ModuleNotFoundError" in str(error) else f"an error: {type(cause).__name__}"
    except ray.exceptions.RayError as error:
        return f"an error: {type(error).__name__}"


def different_versions(own: str, versions: Mapping[str, str]) -> str:
    """Why the service cannot run on nodes with these versions, by node name; empty if it can."""
    others = [f"{version} on {name}" for name, version in sorted(versions.items()) if version != own]
    if not others:
        return ""
    return (
        f"the nodes of the Ray cluster need {_DISTRIBUTION} {own}, which this process has, and have {', '.join(others)}; "
        f"install the same version on all nodes"
    )
