"""Which processes share a node. Pure: no Ray."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from multiworld_serving.common.config.errors import UserError


class NodeResources(NamedTuple):
    """What one process needs, or what a node has free."""

    cores: float
    gpus: int = 0

    def __str__(self) -> str:
        amounts = {"CPUs": self.cores, "GPUs": self.gpus}
        return " + ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount) or "nothing"


class ActorPlacement(NamedTuple):
    """What Ray should reserve.

    Attributes:
        bundles: names of the processes of each bundle; Ray places the processes of a bundle on one node.
        strict: every bundle must be on another node.
    """

    bundles: tuple[tuple[str, ...], ...]
    strict: bool


def place(groups: Sequence[Mapping[str, NodeResources]], nodes: Sequence[NodeResources], spread: int) -> ActorPlacement:
    """Choose the bundles of a service.

    A bundle has an equal share of each group: with as many bundles as replicas, it holds one replica of every stage, so the loss of a node
    costs at most one replica of a stage. If no node has room for such a share, each process is a bundle, and Ray spreads them as well as
    it can.

    Args:
        groups: for each role the processes by name, with what they need.
        nodes: what each node has free.
        spread: number of bundles if there are enough nodes: replicas of a stage, or leaders, whichever are more.
    Raises:
        UserError: the nodes do not have these resources; says which and how many are missing.
    """
    needs = {name: need for group in groups for name, need in group.items()}
    count = max(1, min(spread, len(nodes)))
    shares = [[name for group in groups for name in list(group)[index::count]] for index in range(count)]
    bundles = tuple(tuple(share) for share in shares if share)
    if _fit([total([needs[name] for name in bundle]) for bundle in bundles], nodes, alone=True):
        return ActorPlacement(bundles, strict=True)
    singles = sorted(needs.values(), key=lambda need: (need.gpus, need.cores), reverse=True)
    if _fit(singles, nodes, alone=False):
        return ActorPlacement(tuple((name,) for name in needs), strict=False)
    raise UserError(_shortage(singles, nodes))


def total(needs: Sequence[NodeResources]) -> NodeResources:
    """The sum."""
    return NodeResources(sum(need.cores for need in needs), sum(need.gpus for need in needs))


def _fit(needs: Sequence[NodeResources], nodes: Sequence[NodeResources], *, alone: bool) -> bool:
    """Whether there is room for all, each on the emptiest node. `alone`: each on another node."""
    left = list(nodes)
    for need in needs:
        node = max(
            (node for node in left if node.cores >= need.cores and node.gpus >= need.gpus),
            key=lambda each: (each.gpus, each.cores),
            default=None,
        )
        if node is None:
            return False
        left.remove(node)
        if not alone:
            left.append(NodeResources(node.cores - need.cores, node.gpus - need.gpus))
    return True


def _shortage(needs: Sequence[NodeResources], nodes: Sequence[NodeResources]) -> str:
    needed, free = total(needs), total(nodes)
    missing = NodeResources(math.ceil(max(0, needed.cores - free.cores)), max(0, needed.gpus - free.gpus))
    if missing == (0, 0):
        return (
            f"the Ray cluster has enough in total, but not where one process can use it: a process needs {needs[0]}, and the nodes have "
            f"free {'; '.join(map(str, nodes))}; reduce --threads, or use larger nodes"
        )
    return (
        f"the Ray cluster lacks {missing}: the service needs {needed}, and its {len(nodes)} nodes have free {free} in total; "
        f"add nodes, or reduce --stages, --replicas, --spares or --threads"
    )
