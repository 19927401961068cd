"""Partitions a chain of blocks into stages by dynamic programming."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from multiworld_serving.models.errors import StageError

_Score = tuple[float, float]


def partition(costs: Sequence[float], num_stages: int, transfers: Sequence[float]) -> list[tuple[int, int]]:
    """Partition blocks into `num_stages` contiguous stages that minimise the cost of the slowest stage.

    Ties are broken by the least cost of transfers, then by the most even partition (smallest sum of squared stage costs).

    Args:
        costs: cost of each block, >= 0, in any unit.
        num_stages: from 1 to the number of blocks.
        transfers: cost of sending or receiving the tensor after each block except the last, in the unit of `costs`, added to the
            stages on both sides.
    Returns:
        (first, end) of each stage, end exclusive, in order.
    Raises:
        StageError: `num_stages` is out of range.
    """
    if not 1 <= num_stages <= len(costs):
        raise StageError(
            f"{num_stages} stages, but the model can be cut into at most {len(costs)}; choose 1 to {len(costs)} stages"
        )
    assert len(transfers) == len(costs) - 1
    cost_of = _StageCost(costs, transfers)
    return list(pairwise([0, *_best_ends(cost_of, num_stages, _slowest_stage(cost_of, num_stages))]))


class _StageCost:
    """Cost of a stage of blocks `first` to `end` (exclusive), including its transfers."""

    def __init__(self, costs: Sequence[float], transfers: Sequence[float]) -> None:
        self.num_blocks = len(costs)
        self._before = list(accumulate(costs, initial=0))
        self.crossing = [0.0, *transfers, 0.0]

    def __call__(self, first: int, end: int) -> float:
        return self._before[end] - self._before[first] + self.crossing[first] + self.crossing[end]


def _slowest_stage(cost_of: _StageCost, num_stages: int) -> float:
    """Cost of the slowest stage in the best partition."""
    num_blocks = cost_of.num_blocks
    slowest = {end: cost_of(0, end) for end in range(1, num_blocks + 1)}  # with one stage, by its end
    for stage in range(1, num_stages):
        slowest = {
            end: min(max(slowest[start], cost_of(start, end)) for start in range(stage, end))
            for end in range(stage + 1, num_blocks + 1)
        }
    return slowest[num_blocks]


def _best_ends(cost_of: _StageCost, num_stages: int, limit: float) -> tuple[int, ...]:
    """Ends of the stages of the best partition without a stage above `limit`.

    This is a second pass because the tie-breakers are additive only among partitions within the limit: a prefix that is not the fastest
    may be part of the best partition if a later stage is the slowest.
    """
    num_blocks = cost_of.num_blocks
    best: dict[int, tuple[_Score, tuple[int, ...]]] = {0: ((0, 0), ())}  # by end of the last stage so far
    for _ in range(num_stages):
        following: dict[int, tuple[_Score, tuple[int, ...]]] = {}
        for start, ((moved, squares), ends) in best.items():
            for end in range(start + 1, num_blocks + 1):
                cost = cost_of(start, end)
                if cost > limit:
                    continue  # a later boundary may be cheaper to cross
                candidate = ((moved + cost_of.crossing[end], squares + cost * cost), (*ends, end))
                if end not in following or candidate < following[end]:
                    following[end] = candidate
        best = following
    return best[num_blocks][1]
