"""Which processes share a node. Pure: no Ray."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from multiworld_serving.common.config import UserError
from multiworld_serving.deploy.processes.launcher import Resources


class Placement(NamedTuple):
    """What Ray should reserve.

    Attributes:
        bundles: names of the processes of each bundle; Ray places the processes of a bundle on one node.
        strict: every bundle must be on another node.
    """

    bundles: tuple[tuple[str, ...], ...]
    strict: bool


def place(groups: Sequence[Mapping[str, Resources]], nodes: Sequence[Resources], spread: int) -> Placement:
    """Choose the bundles of a service.

    A bundle has an equal share of each group: with as many bundles as replicas, it holds one replica of every stage, so the loss of a node
    costs at most one replica of a stage. If no node has room for such a share, each process is a bundle, and Ray spreads them as well as
    it can.

    Args:
        groups: for each role the processes by name, with what they need.
        nodes: what each node has.
        spread: number of bundles if there are enough nodes: replicas of a stage, or leaders, whichever are more.
    Raises:
        UserError: the nodes do not have these resources; says which and how many are missing.
    """
    needs = {name: need for group in groups for name, need in group.items()}
    count = max(1, min(spread, len(nodes)))
    shares: list[list[str]] = [[] for _ in range(count)]
    for group in groups:
        for index, name in enumerate(group):
            shares[index % count].append(name)
    bundles = tuple(tuple(share) for share in shares if share)
    if _fit([total([needs[name] for name in bundle]) for bundle in bundles], nodes, alone=True):
        return Placement(bundles, strict=True)
    singles = sorted(needs.values(), key=lambda need: (need.gpus, need.cores, need.memory_bytes), reverse=True)
    if _fit(singles, nodes, alone=False):
        return Placement(tuple((name,) for name in needs), strict=False)
    raise UserError(_shortage(singles, nodes))


def total(needs: Sequence[Resources]) -> Resources:
    """The sum."""
    return Resources(
        sum(need.cores for need in needs), sum(need.gpus for need in needs), sum(need.memory_bytes for need in needs)
    )


def _fit(needs: Sequence[Resources], nodes: Sequence[Resources], *, alone: bool) -> bool:
    """Whether there is room for all, each on the emptiest node that can hold it. `alone`: each on another node."""
    left = list(nodes)
    for need in needs:
        candidates = [node for node in left if covers(node, need)]
        if not candidates:
            return False
        node = max(candidates, key=lambda each: (each.gpus, each.cores))
        left.remove(node)
        if not alone:
            left.append(without(node, need))
    return True


def covers(node: Resources, need: Resources) -> bool:
    """Whether a node has room for this need."""
    return all(have >= wanted for have, wanted in zip(node, need, strict=True))


def without(node: Resources, need: Resources) -> Resources:
    """What is left of a node."""
    return Resources(node.cores - need.cores, node.gpus - need.gpus, node.memory_bytes - need.memory_bytes)


def _shortage(needs: Sequence[Resources], nodes: Sequence[Resources]) -> str:
    needed, free = total(needs), total(nodes)
    missing = [math.ceil(max(0, wanted - have)) for have, wanted in zip(free, needed, strict=True)]
    lacks = [
        *([f"{missing[0]} CPUs"] if missing[0] else []),
        *([f"{missing[1]} GPUs"] if missing[1] else []),
        *([f"{missing[2] / 1e9:.1f} GB of memory"] if missing[2] else []),
    ]
    have = "; ".join(f"{text(node)}" for node in nodes) or "no node"
    if lacks:
        return (
            f"the Ray cluster lacks {' and '.join(lacks)}: the service needs {text(needed)}, and its {len(nodes)} nodes have free "
            f"{text(free)} in total; add nodes, or reduce --stages, --replicas, --spares or --threads"
        )
    largest = max(needs, key=lambda need: (need.gpus, need.cores, need.memory_bytes))
    return (
        f"the Ray cluster has enough in total, but not where one process can use it: a process needs {text(largest)}, and the nodes "
        f"have free {have}; reduce --threads or --worker-memory, or use larger nodes"
    )


def text(each: Resources) -> str:
    """Resources as they are shown: "4 CPUs + 1 GPUs"."""
    parts = [f"{each.cores:g} CPUs"]
    if each.gpus:
        parts.append(f"{each.gpus:g} GPUs")
    if each.memory_bytes:
        parts.append(f"{each.memory_bytes / 1e9:.1f} GB")
    return " + ".join(parts)
