"""Partitions compared with brute force, and costs compared with an independent count."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import get_model

from multiworld_serving.models import (
    MODEL_NAMES,
    ModelError,
    block_names,
    count_multiply_adds,
    measure_costs,
    split_model,
)
from multiworld_serving.models.partition import partition
from tests.unit.models.models_loaded import IMAGE_SIZE, loaded

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


@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize("num_stages", range(1, 7))
def test_partition_covers_the_model_and_balances_the_counted_work(name: str, num_stages: int) -> None:
    specs = split_model(loaded(name), num_stages)
    assert [spec.index for spec in specs] == list(range(num_stages))
    assert [block for spec in specs for block in spec.blocks] == list(block_names(name))
    assert [spec.is_first for spec in specs] == [True] + [False] * (num_stages - 1)
    assert [spec.is_last for spec in specs] == [False] * (num_stages - 1) + [True]
    costs = count_multiply_adds(name, IMAGE_SIZE)
    slowest = max(sum(costs[spec.first_block : spec.end_block]) for spec in specs)
    assert slowest <= sum(costs) / num_stages + max(costs)


def test_partition_follows_the_given_costs() -> None:
    model = loaded("resnet18")
    costs = [100.0] + [1.0] * 9
    assert [spec.end_block for spec in split_model(model, 2, costs=costs)] == [1, 10]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_counted_costs_are_half_of_torch_flop_counts(name: str) -> None:
    batch = torch.empty(1, 3, 96, 96, device="meta")
    counter = FlopCounterMode(display=False)
    with torch.device("meta"):
        model = get_model(name, num_classes=10).eval()
    with counter:
        model(batch)
    costs = count_multiply_adds(name, 96, num_classes=10)
    assert len(costs) == len(block_names(name))
    assert 2 * sum(costs) == counter.get_total_flops()


def test_counted_costs_of_stem_and_head_equal_manual_calculation() -> None:
    costs = count_multiply_adds("resnet18", 224)
    assert costs[0] == 64 * 112 * 112 * 3 * 7 * 7
    assert costs[-1] == 512 * 1000
    assert 1.81e9 < sum(costs) < 1.82e9  # the 1.81 GFLOPS (multiply-adds) that torchvision publishes


def test_measured_costs_are_one_positive_time_per_block_and_give_a_partition() -> None:
    model = loaded("resnet18")
    before = torch.random.get_rng_state()
    costs = measure_costs(model, image_size=32, repeats=1, warmup=0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(costs) == len(block_names("resnet18"))
    assert all(cost > 0 for cost in costs)
    assert len(split_model(model, 3, costs=costs)) == 3


@pytest.mark.parametrize("num_stages", [0, -1, 11, True])
def test_impossible_number_of_stages_is_refused(num_stages: int) -> None:
    with pytest.raises(ModelError, match="has 10 blocks; expected 1 to 10 stages"):
        split_model(loaded("resnet18"), num_stages)


@pytest.mark.parametrize(
    "costs",
    [
        pytest.param([1.0] * 9, id="too few"),
        pytest.param([1.0] * 9 + [float("nan")], id="nan"),
        pytest.param([1.0] * 9 + [-1.0], id="negative"),
    ],
)
def test_costs_that_do_not_match_the_blocks_are_refused(costs: list[float]) -> None:
    with pytest.raises(ModelError, match="expected 10 numbers"):
        split_model(loaded("resnet18"), 2, costs=costs)


def test_empty_measurement_is_refused() -> None:
    with pytest.raises(ModelError, match="repeats is 0"):
        measure_costs(loaded("resnet18"), repeats=0)
