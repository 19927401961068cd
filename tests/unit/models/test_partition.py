"""Partitions compared with brute force."""

import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld_serving.models.partition import partition

Ranges = list[tuple[int, int]]


def score(costs: Sequence[float], boundaries: Sequence[float], ranges: Ranges) -> tuple[float, float, float]:
    stages = [sum(costs[first:end]) for first, end in ranges]
    moved = sum(boundaries[end - 1] for _, end in ranges[:-1])
    return max(stages), moved, sum(stage * stage for stage in stages)


def brute_force(costs: Sequence[float], num_stages: int, boundaries: Sequence[float]) -> tuple[float, float, float]:
    cuts = combinations(range(1, len(costs)), num_stages - 1)
    return min(score(costs, boundaries, list(pairwise([0, *ends, len(costs)]))) for ends in cuts)


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[int], int, list[int]]:
    costs = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    boundaries = draw(st.lists(st.integers(0, 4), min_size=len(costs) - 1, max_size=len(costs) - 1))
    return costs, draw(st.integers(1, len(costs))), boundaries


@given(chains())
def test_partition_is_as_good_as_brute_force(chain: tuple[list[int], int, list[int]]) -> None:
    costs, num_stages, boundaries = chain
    ranges = partition(costs, num_stages, boundaries)
    assert len(ranges) == num_stages
    assert all(first < end for first, end in ranges)
    assert [index for first, end in ranges for index in range(first, end)] == list(range(len(costs)))
    assert score(costs, boundaries, ranges) == brute_force(costs, num_stages, boundaries)


def slowest(costs: list[float], transfers: list[float], ends: tuple[int, ...]) -> float:
    """The cost of the slowest stage of this partition, including transfers."""
    crossing = [0.0, *transfers, 0.0]
    return max(sum(costs[first:end]) + crossing[first] + crossing[end] for first, end in pairwise((0, *ends)))


@pytest.mark.parametrize("seed", range(20))
def test_partition_with_transfer_costs_is_as_good_as_brute_force(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(2, 9)
    costs = [chance.choice((0.0, chance.random(), 1.0)) for _ in range(count)]
    transfers = [chance.choice((0.0, chance.random() / 2, 3.0)) for _ in range(count - 1)]
    for stages in range(1, count + 1):
        found = partition(costs, stages, [1.0] * (count - 1), transfers=transfers)
        assert [first for first, _ in found] == [0, *(end for _, end in found[:-1])]
        assert found[-1][1] == count
        best = min(slowest(costs, transfers, (*inner, count)) for inner in combinations(range(1, count), stages - 1))
        assert slowest(costs, transfers, tuple(end for _, end in found)) == pytest.approx(best)
