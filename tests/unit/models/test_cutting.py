"""Estimated work of the nodes of a graph, and cuts by it; partitions compared with brute force."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld_serving.models.bundle.cutting import cut_graph, estimate_costs, partition
from multiworld_serving.models.bundle.nodes import Call, Calls
from multiworld_serving.models.errors import ModelError
from tests.bundles import classifier_bundle


def test_graph_and_costs_do_not_depend_on_the_weights(tmp_path: Path) -> None:
    """Leaders on all machines cut alike."""
    one, other = (classifier_bundle(tmp_path / str(seed), seed) for seed in (0, 1))
    assert one.graph == other.graph
    assert one.manifest.costs_s == other.manifest.costs_s == estimate_costs(one.graph, {"batch": 1})


def test_model_is_cut_before_convolutions_only(tmp_path: Path) -> None:
    """Workers fuse a convolution with the batch norm and activation after it, so these stay in one stage."""
    bundle = classifier_bundle(tmp_path / "bundle")
    graph, costs_s = bundle.graph, bundle.manifest.costs_s
    for num_stages in (2, 3, 4):
        cut = cut_graph(graph, costs_s, num_stages, bundle.manifest.lengths[-1])
        assert max(cut.stage_s) <= sum(costs_s) / num_stages + 2 * max(costs_s)
        for stage in graph.cut(cut.positions)[1:]:
            first = next(node.target for node in stage.nodes if isinstance(node, Call | Calls))
            assert first in ("aten.conv2d.default", "aten.linear.default")
    with pytest.raises(ModelError, match="can be cut into at most"):
        cut_graph(graph, costs_s, 500, bundle.manifest.lengths[-1])


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
