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
    rounds: int | None = None,
    device: str = "cpu",
) -> tuple[float, ...]:
    """Seconds per row of each node on this device: the median of the rounds, after one that warms up.

    Args:
        rounds: None: at least 3, and at most 25 while they have taken less than two seconds together.
    Raises:
        RuntimeError: torch cannot use the device.
    """
    target = torch.device(device)
    timer = _Timer(graph.build({key: tensor.to(target) for key, tensor in weights.items()}, target), target)
    example = [tensor.to(target) for tensor in example]
    runs: list[list[float]] = []
    least, most = (_LEAST_ROUNDS, _MOST_ROUNDS) if rounds is None else (rounds, rounds)
    end_s = time.monotonic() + _ROUNDS_S
    with torch.no_grad():
        while len(runs) <= least or (len(runs) <= most and time.monotonic() < end_s):
            timer.taken_s = []
            timer.run(*example)
            runs.append(timer.taken_s)
    return tuple(statistics.median(each) / len(example[0]) for each in zip(*runs[1:], strict=True))[: len(graph.nodes)]


def times_of_blocks(costs_s: Sequence[float], times_s: Sequence[float]) -> tuple[float, ...]:
    """Measured times for cutting where `costs_s` allows it: the time of a node without cost is added to the next node with one."""
    found, passed_s = [], 0.0
    for cost_s, time_s in zip(costs_s, times_s, strict=True):
        passed_s += time_s
        found.append(passed_s if cost_s else 0.0)
        passed_s = 0.0 if cost_s else passed_s
    return tuple(found)


class _Timer(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        super().__init__(module)
        self.taken_s: list[float] = []
        self._device = device

    def run_node(self, n: fx.Node) -> Any:
        started_s = time.perf_counter()
        value = super().run_node(n)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.taken_s.append(time.perf_counter() - started_s)
        return value


def cut_graph(
    graph: Graph,
    costs_s: Sequence[float],
    num_stages: int | None,
    lengths: Mapping[str, int],
    *,
    link_bytes_per_s: float = _LINK_BYTES_PER_S,
    speeds: Sequence[float] | None = None,
) -> Cut:
    """Cut the graph so that the slowest stage is as fast as possible.

    Args:
        num_stages: None: the largest number up to `MAX_AUTO_STAGES` with stages of nearly equal time.
        lengths: the largest lengths of the variable dimensions, for the bytes that cross a boundary.
        link_bytes_per_s: speed of a transfer between two stages.
        speeds: of the devices of each stage, compared with the device that took `costs_s`, if `num_stages` is given. None: the same.
    Raises:
        StageError: the graph has fewer places to cut.
    """
    if num_stages is not None:
        return _cut(graph, costs_s, num_stages, lengths, link_bytes_per_s, speeds)
    best = _cut(graph, costs_s, 1, lengths, link_bytes_per_s)
    for count in range(2, MAX_AUTO_STAGES + 1):
        try:
            found = _cut(graph, costs_s, count, lengths, link_bytes_per_s)
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
    link_bytes_per_s: float,
    speeds: Sequence[float] | None = None,
) -> Cut:
    found = _positions(graph, costs_s, lengths)
    positions = sorted(found)
    ends = [*positions, len(graph.nodes) - 1]
    starts = [0, *(position + 1 for position in positions)]
    blocks_s = [sum(costs_s[start : end + 1]) for start, end in zip(starts, ends, strict=True)]
    sizes = [found[position] for position in positions]
    transfers = [size / link_bytes_per_s for size in sizes]
    if num_stages > len(blocks_s):
        raise StageError(
            f"{num_stages} stages, but the model can be cut into at most {len(blocks_s)}; choose 1 to {len(blocks_s)} stages"
        )
    ranges = partition(blocks_s, num_stages, [float(size) for size in sizes], transfers=transfers, speeds=speeds)
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
