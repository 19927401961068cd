"""Estimates the work of the nodes of a graph, and chooses where to cut it into stages."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch.utils.flop_counter import FlopCounterMode

from multiworld_serving.models.bundle.checking import values_of
from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.manifest import Manifest
from multiworld_serving.models.bundle.nodes import Call, Input, Item
from multiworld_serving.models.errors import StageSpecError

_MAX_POSITIONS = 128
"""Positions considered for cuts. More would make the partition slow and hardly better."""
MAX_AUTO_STAGES = 8
_LEAST_BALANCE = 0.9
_OPERATIONS_PER_S, _MEMORY_BYTES_PER_S = 1e11, 1e10
"""Assumed speed of a worker."""
_LARGE_BLOCK = 0.25
"""Share of the work of a block that makes stages uneven."""
_LINK_BYTES_PER_S = 2e9
"""Assumed speed of a transfer between two stages: loopback on one machine."""


@dataclass(frozen=True)
class Cut:
    """A graph cut into stages.

    Attributes:
        positions: after which a stage ends, without the last one.
        stage_s: estimated seconds of each stage per row.
        boundary_bytes: bytes per row that cross each cut, with variable dimensions of their largest lengths.
    """

    positions: tuple[int, ...]
    stage_s: tuple[float, ...]
    boundary_bytes: tuple[int, ...]

    @property
    def balance(self) -> float:
        """Mean stage time divided by the slowest stage's time; 1 is perfectly balanced."""
        return sum(self.stage_s) / len(self.stage_s) / max(self.stage_s) if max(self.stage_s) else 1.0


def estimate_costs(graph: Graph, lengths: Mapping[str, int]) -> tuple[float, ...]:
    """Estimated seconds per row of each block, at its last node; 0 for all other nodes, so that nothing is cut within a block.

    A block has one operator that multiplies, such as a convolution, and what follows it up to where the fewest bytes cross. So operators
    that workers fuse stay together. Blocks end where the fewest tensors cross, if none of them is too large then. The estimate is the same
    on every machine, so that all leaders cut alike.

    Args:
        lengths: of the variable dimensions.
    """
    work_s, ends = [0.0] * len(graph.nodes), dict[int, int]()
    fewest, end = math.inf, None
    for position, (node, operations) in enumerate(zip(graph.nodes, _operations(graph, lengths), strict=True)):
        if operations and end is not None:
            ends[end] = len(graph.live_after(end) or ())
            fewest, end = math.inf, None
        written = node.row_bytes(lengths) if isinstance(node, Call | Item) else 0
        work_s[position] = operations / _OPERATIONS_PER_S + written / _MEMORY_BYTES_PER_S
        crossing = graph.live_after(position) if work_s[position] else None
        if crossing:
            size = sum(graph.tensor(name).row_bytes(lengths) for name in crossing)
            if size <= fewest:
                fewest, end = size, position
    if not ends:  # at most one operator multiplies: each node is a block
        return tuple(work_s)
    few = {end for end, count in ends.items() if count == min(ends.values())}
    costs_s = _summed(work_s, few)
    return costs_s if max(costs_s) <= sum(costs_s) * _LARGE_BLOCK else _summed(work_s, ends)


def _summed(work_s: Sequence[float], ends: Collection[int]) -> tuple[float, ...]:
    """The work of each block at its end."""
    found, passed_s = [0.0] * len(work_s), 0.0
    for position, each_s in enumerate(work_s):
        passed_s += each_s
        if position in ends or position == len(work_s) - 1:
            found[position], passed_s = passed_s, 0.0
    return tuple(found)


def _operations(graph: Graph, lengths: Mapping[str, int]) -> list[int]:
    """Floating-point operations of each node for one row, counted on tensors without data."""
    module = graph.build({node.key: node.empty() for node in graph.weights}, torch.device("meta"))
    values = values_of(module, [node.empty(lengths) for node in graph.inputs])
    found = []
    for _ in graph.nodes:
        with FlopCounterMode(display=False) as counter:
            next(values)
        found.append(counter.get_total_flops())
    return found


def cut_graph(
    graph: Graph,
    costs_s: Sequence[float],
    num_stages: int | None,
    lengths: Mapping[str, int],
) -> Cut:
    """Cut the graph so that the slowest stage is as fast as possible.

    Args:
        num_stages: None: the largest number up to `MAX_AUTO_STAGES` with stages of nearly equal time.
        lengths: the largest lengths of the variable dimensions, for the bytes that cross a boundary.
    Raises:
        StageSpecError: the graph has fewer places to cut.
    """
    found = _positions(graph, costs_s, lengths)
    positions = sorted(found)
    passed_s = list(accumulate(costs_s, initial=0.0))
    starts = [0, *(position + 1 for position in positions), len(costs_s)]
    blocks_s = [passed_s[end] - passed_s[start] for start, end in pairwise(starts)]
    transfers_s = [found[position] / _LINK_BYTES_PER_S for position in positions]

    def cut(count: int) -> Cut:
        ends = partition(blocks_s, count, transfers_s)
        chosen = tuple(positions[end - 1] for end in ends[:-1])
        stage_s = tuple(sum(blocks_s[first:end]) for first, end in pairwise([0, *ends]))
        return Cut(chosen, stage_s, tuple(found[position] for position in chosen))

    if num_stages is not None:
        return cut(num_stages)
    cuts = map(cut, range(1, min(MAX_AUTO_STAGES, len(blocks_s)) + 1))
    return [each for each in cuts if each.balance >= _LEAST_BALANCE][-1]  # one stage is always balanced


def partition(costs: Sequence[float], num_stages: int, transfers: Sequence[float]) -> tuple[int, ...]:
    """Partition blocks into contiguous stages that minimise the cost of the slowest stage. Of equal ones, prefer even stages.

    Args:
        costs: cost of each block, >= 0, in any unit.
        num_stages: from 1 to the number of blocks.
        transfers: cost of sending or receiving the tensor after each block except the last, in the unit of `costs`, added to the
            stages on both sides.
    Returns:
        The end of each stage, exclusive, in order.
    Raises:
        StageSpecError: `num_stages` is out of range.
    """
    count = len(costs)
    if not 1 <= num_stages <= count:
        raise StageSpecError(
            f"{num_stages} stages, but the model can be cut into at most {count}; choose 1 to {count} stages"
        )
    before, crossing = list(accumulate(costs, initial=0)), [0.0, *transfers, 0.0]
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0, 0, ())}
    """The slowest stage, the sum of squared costs, and the ends, by the end of the last stage."""
    for _ in range(num_stages):
        following = {}
        for end in range(1, count + 1):
            options = []
            for start, (slowest, squares, ends) in best.items():
                if start < end:
                    cost = before[end] - before[start] + crossing[start] + crossing[end]
                    options.append((max(slowest, cost), squares + cost * cost, ends))
            if options:
                slowest, squares, ends = min(options)
                following[end] = slowest, squares, (*ends, end)
        best = following
    return best[count][2]


def _positions(graph: Graph, costs_s: Sequence[float], lengths: Mapping[str, int]) -> dict[int, int]:
    """Positions for cuts, with the bytes per row that cross: in each part of the computing time, the one that the fewest cross."""
    total_s = sum(costs_s) or 1.0
    best: dict[int, tuple[int, int]] = {}
    passed_s = 0.0
    for position in range(len(graph.nodes) - 1):
        passed_s += costs_s[position]
        crossing = graph.live_after(position) if costs_s[position] else None
        if not crossing or all(isinstance(graph.by_name[name], Input) for name in crossing):
            continue
        if set(crossing) == set(graph.outputs):  # the last stage would have no work
            continue
        part = int(_MAX_POSITIONS * passed_s / total_s)
        size = sum(graph.tensor(name).row_bytes(lengths) for name in crossing)
        if part not in best or size < best[part][0]:
            best[part] = (size, position)
    return {position: size for size, position in best.values()}


def cuts_of(manifest: Manifest, graph: Graph, num_stages: int) -> tuple[int, ...]:
    """Where a bundle is cut into stages: at its own positions if it was exported with as many stages.

    Raises:
        StageSpecError: the graph cannot be cut into as many stages.
    """
    if num_stages == len(manifest.cuts) + 1:
        return manifest.cuts
    return cut_graph(graph, manifest.costs_s, num_stages, manifest.lengths[-1]).positions
