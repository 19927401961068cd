"""Partitions compared with brute force."""

from collections.abc import Sequence
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from multiworld_serving.models.bundle.cutting import partition


def slowest(costs: Sequence[int], transfers: Sequence[int], ends: Sequence[int]) -> int:
    """The cost of the slowest stage with its transfers."""
    crossing = [0, *transfers, 0]
    return max(sum(costs[first:end]) + crossing[first] + crossing[end] for first, end in pairwise([0, *ends]))


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[int], int, list[int]]:
    costs = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    transfers = draw(st.lists(st.integers(0, 4), min_size=len(costs) - 1, max_size=len(costs) - 1))
    return costs, draw(st.integers(1, len(costs))), transfers


@given(chains())
def test_slowest_stage_is_as_fast_as_by_brute_force(chain: tuple[list[int], int, list[int]]) -> None:
    costs, num_stages, transfers = chain
    ends = partition(costs, num_stages, transfers)
    assert len(ends) == num_stages
    assert ends[-1] == len(costs)
    assert all(first < end for first, end in pairwise([0, *ends]))
    cuts = combinations(range(1, len(costs)), num_stages - 1)
    best = min(slowest(costs, transfers, [*each, len(costs)]) for each in cuts)
    assert slowest(costs, transfers, ends) == best


def test_partition_prefers_the_most_even_split_when_several_are_as_fast() -> None:
    assert partition([9, 1, 1, 1, 1], 3, [0, 0, 0, 0]) == (1, 3, 5)
