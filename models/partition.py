"""Where to cut a chain of blocks: dynamic programming over the boundaries. Pure arithmetic."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from models.errors import StageError

_Score = tuple[float, float]


def partition(costs: Sequence[float], num_stages: int, boundaries: Sequence[float]) -> list[tuple[int, int]]:
    """Cut blocks into `num_stages` contiguous stages such that the slowest stage is as fast as possible.

    Among the cuts with the same slowest stage, the one that moves least between stages is chosen, and among those the
    most even one (smallest sum of squared stage costs).

    Args:
        costs: of each block, 0 or more, any unit.
        num_stages: from 1 to the number of blocks.
        boundaries: cost of moving the output of each block but the last to the next one, any unit.
    Returns:
        (first, end) of each stage, end exclusive, in order.
    Raises:
        StageError: `num_stages` is out of range.
    """
    if isinstance(num_stages, bool) or not 1 <= num_stages <= len(costs):
        raise StageError(
            f"{num_stages} stages, but the model has {len(costs)} blocks; expected 1 to {len(costs)} stages"
        )
    assert len(boundaries) == len(costs) - 1
    before = list(accumulate(costs, initial=0))
    limit = _slowest_stage(before, num_stages)
    ends = _best_ends(before, num_stages, limit, boundaries)
    return list(pairwise([0, *ends]))


def _slowest_stage(before: Sequence[float], num_stages: int) -> float:
    """Cost of the slowest stage in the best cut. `before[i]` is the cost of all blocks before block i."""
    num_blocks = len(before) - 1
    slowest = {end: before[end] for end in range(1, num_blocks + 1)}  # of one stage that ends at `end`
    for stages in range(2, num_stages + 1):
        slowest = {
            end: min(max(slowest[cut], before[end] - before[cut]) for cut in range(stages - 1, end))
            for end in range(stages, num_blocks + 1)
        }
    return slowest[num_blocks]


def _best_ends(before: Sequence[float], num_stages: int, limit: float, boundaries: Sequence[float]) -> tuple[int, ...]:
    """Ends of the stages of the best cut without a stage above `limit`.

    A second pass, because what comes second is additive only among cuts that all keep the limit: a prefix that is
    not the fastest may be part of the best cut when a later stage is the slowest anyway.
    """
    num_blocks = len(before) - 1
    best: dict[int, tuple[_Score, tuple[int, ...]]] = {0: ((0, 0), ())}  # by end of the last stage so far
    for _ in range(num_stages):
        following: dict[int, tuple[_Score, tuple[int, ...]]] = {}
        for cut, ((moved, squares), ends) in best.items():
            for end in range(cut + 1, num_blocks + 1):
                cost = before[end] - before[cut]
                if cost > limit:
                    break
                crossing = boundaries[end - 1] if end < num_blocks else 0
                candidate = ((moved + crossing, squares + cost * cost), (*ends, end))
                if end not in following or candidate < following[end]:
                    following[end] = candidate
        best = following
    return best[num_blocks][1]
