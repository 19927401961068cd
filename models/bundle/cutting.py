"""Measures the nodes of a graph and chooses where to cut it into stages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.errors import StageError
from multiworld_serving.models.partition import partition

_MAX_POSITIONS = 128
"""Positions considered for cuts. More would make the partition slow and hardly better."""
MAX_AUTO_STAGES = 8
_LEAST_BALANCE = 0.9
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 25
_ROUNDS_S = 2.0
"""A measurement of nodes starts no round after `_LEAST_ROUNDS` and this time."""
_LINK_BYTES_PER_S = 2e9
"""Assumed speed of a transfer between two stages: loopback on one machine."""


@dataclass(frozen=True)
class Cut:
    """A graph cut into stages.

    Attributes:
        positions: after which a stage ends, without the last one.
        stage_s: seconds of each stage per row, on the device that took the costs.
        boundary_bytes: bytes per row that cross each cut, with variable dimensions of their largest lengths.
    """

    positions: tuple[int, ...]
    stage_s: tuple[float, ...]
    boundary_bytes: tuple[int, ...]

    @property
    def balance(self) -> float:
        """Mean stage time divided by the slowest stage's time; 1 is perfectly balanced."""
        return sum(self.stage_s) / len(self.stage_s) / max(self.stage_s) if max(self.stage_s) else 1.0


def measure_nodes(
    graph: Graph,
    weights: Mapping[str, Tensor],
    example: Sequence[Tensor],
) -> tuple[float, ...]:
    """Seconds per row of each node on the CPU: the median of at least 3 rounds, after one that warms up."""
    timer = _Timer(graph.build(weights, torch.device("cpu")))
    runs: list[list[float]] = []
    end_s = time.monotonic() + _ROUNDS_S
    with torch.no_grad():
        while len(runs) <= _LEAST_ROUNDS or (len(runs) <= _MOST_ROUNDS and time.monotonic() < end_s):
            timer.taken_s = []
            timer.run(*example)
            runs.append(timer.taken_s)
    return tuple(statistics.median(each) / len(example[0]) for each in zip(*runs[1:], strict=True))[: len(graph.nodes)]


class _Timer(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.taken_s: list[float] = []

    def run_node(self, n: fx.Node) -> Any:
        started_s = time.perf_counter()
        value = super().run_node(n)
        self.taken_s.append(time.perf_counter() - started_s)
        return value


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
        StageError: the graph has fewer places to cut.
    """
    if num_stages is not None:
        return _cut(graph, costs_s, num_stages, lengths)
    best = _cut(graph, costs_s, 1, lengths)
    for count in range(2, MAX_AUTO_STAGES + 1):
        try:
            found = _cut(graph, costs_s, count, lengths)
        except StageError:
            break
        if found.balance >= _LEAST_BALANCE:
            best = found
    return best


def _cut(
    graph: Graph,
    costs_s: Sequence[float],
    num_stages: int,
    lengths: Mapping[str, int],
) -> Cut:
    found = _positions(graph, costs_s, lengths)
    positions = sorted(found)
    ends = [*positions, len(graph.nodes) - 1]
    starts = [0, *(position + 1 for position in positions)]
    blocks_s = [sum(costs_s[start : end + 1]) for start, end in zip(starts, ends, strict=True)]
    sizes = [found[position] for position in positions]
    transfers = [size / _LINK_BYTES_PER_S for size in sizes]
    if num_stages > len(blocks_s):
        raise StageError(
            f"{num_stages} stages, but the model can be cut into at most {len(blocks_s)}; choose 1 to {len(blocks_s)} stages"
        )
    ranges = partition(blocks_s, num_stages, [float(size) for size in sizes], transfers)
    return Cut(
        tuple(positions[end - 1] for _, end in ranges[:-1]),
        tuple(sum(blocks_s[first:end]) for first, end in ranges),
        tuple(sizes[end - 1] for _, end in ranges[:-1]),
    )


def _positions(graph: Graph, costs_s: Sequence[float], lengths: Mapping[str, int]) -> dict[int, int]:
    """Positions for cuts, with the bytes per row that cross: in each part of the computing time, the one that the fewest cross."""
    total_s = sum(costs_s) or 1.0
    best: dict[int, tuple[int, int]] = {}
    passed_s = 0.0
    for position in range(len(graph.nodes) - 1):
        passed_s += costs_s[position]
        crossing = graph.live_after(position) if costs_s[position] else None
        if not crossing or all(graph.by_name[name].kind == "input" for name in crossing):
            continue
        if set(crossing) == set(graph.outputs):  # the last stage would have no work
            continue
        part = int(_MAX_POSITIONS * passed_s / total_s)
        size = sum(graph.by_name[name].row_bytes(lengths) for name in crossing)
        if part not in best or size < best[part][0]:
            best[part] = (size, position)
    return {position: size for size, position in best.values()}
