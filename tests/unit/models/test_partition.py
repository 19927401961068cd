"""Partitions compared with brute force."""

from collections.abc import Sequence
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from multiworld_serving.models.partition import partition

Ranges = list[tuple[int, int]]


def score(costs: Sequence[int], transfers: Sequence[int], ranges: Ranges) -> tuple[int, int, int]:
    """The cost of the slowest stage with its transfers, the cost of all transfers, and the sum of squared costs."""
    crossing = [0, *transfers, 0]
    stages = [sum(costs[first:end]) + crossing[first] + crossing[end] for first, end in ranges]
    return max(stages), sum(crossing[end] for _, end in ranges), sum(stage * stage for stage in stages)


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[int], int, list[int]]:
    costs = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    transfers = draw(st.lists(st.integers(0, 4), min_size=len(costs) - 1, max_size=len(costs) - 1))
    return costs, draw(st.integers(1, len(costs))), transfers


@given(chains())
def test_partition_is_as_good_as_brute_force(chain: tuple[list[int], int, list[int]]) -> None:
    costs, num_stages, transfers = chain
    ranges = partition(costs, num_stages, transfers)
    assert len(ranges) == num_stages
    assert [index for first, end in ranges for index in range(first, end)] == list(range(len(costs)))
    assert all(first < end for first, end in ranges)
    cuts = combinations(range(1, len(costs)), num_stages - 1)
    assert score(costs, transfers, ranges) == min(
        score(costs, transfers, list(pairwise([0, *ends, len(costs)]))) for ends in cuts
    )


def test_partition_prefers_the_most_even_split_when_transfers_are_equal() -> None:
    assert partition([9, 1, 1, 1, 1], 3, [0, 0, 0, 0]) == [(0, 1), (1, 3), (3, 5)]
