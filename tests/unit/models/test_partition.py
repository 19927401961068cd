"""Partitions compared with brute force."""

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


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=8), st.data())
def test_partition_is_as_good_as_brute_force_with_float_costs(costs: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    boundaries = [0.0] * (len(costs) - 1)
    slowest, _, _ = score(costs, boundaries, partition(costs, num_stages, boundaries))
    assert slowest == pytest.approx(brute_force(costs, num_stages, boundaries)[0], rel=1e-9, abs=1e-3)


def test_partition_prefers_the_smaller_boundary_when_the_slowest_stage_is_equal() -> None:
    assert partition([1, 0, 1], 2, [8, 4]) == [(0, 2), (2, 3)]
    assert partition([1, 0, 1], 2, [4, 8]) == [(0, 1), (1, 3)]


def test_partition_prefers_the_most_even_split_when_boundaries_are_equal() -> None:
    assert partition([9, 1, 1, 1, 1], 3, [1, 1, 1, 1]) == [(0, 1), (1, 3), (3, 5)]


@given(chains(), st.data())
def test_partition_for_speeds_is_as_good_as_brute_force(
    chain: tuple[list[int], int, list[int]], data: st.DataObject
) -> None:
    costs, num_stages, _ = chain
    speeds = data.draw(st.lists(st.sampled_from([0.25, 1.0, 4.0]), min_size=num_stages, max_size=num_stages))

    def slowest(ranges: Ranges) -> float:
        return max(sum(costs[first:end]) / speed for (first, end), speed in zip(ranges, speeds, strict=True))

    cuts = combinations(range(1, len(costs)), num_stages - 1)
    best = min(slowest(list(pairwise([0, *ends, len(costs)]))) for ends in cuts)
    assert slowest(partition(costs, num_stages, [0.0] * (len(costs) - 1), speeds=speeds)) == best
