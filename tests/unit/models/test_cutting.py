"""Estimated work of the nodes of a graph, and cuts by it."""

from pathlib import Path

import pytest

from multiworld_serving.models.bundle.cutting import cut_graph, estimate_costs
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
