"""ResNets as bundles: the graph that torch.export makes, and cuts between residual blocks by counted work."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import get_model

from multiworld_serving.models import (
    MODEL_NAMES,
    Bundle,
    ModelError,
    WeightsError,
    classifier_bundle,
    count_blocks,
    load_model,
)
from multiworld_serving.models.bundle import cutting
from multiworld_serving.models.bundle.cutting import cut_graph, measure_nodes
from multiworld_serving.models.bundle.files import read_bundle, write_bundle
from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.nodes import Node, Value
from multiworld_serving.models.bundle.operators import find_operator
from multiworld_serving.models.export.classifier import _MULTIPLY_ADDS_PER_S, block_costs_s
from multiworld_serving.models.export.layers import capture_layers
from multiworld_serving.models.export.trace import capture
from multiworld_serving.models.weights.loading import LoadedModel
from tests.resnets import plan_of
from tests.unit.models.models_loaded import IMAGE_SIZE, loaded


def bundle_of(name: str) -> Bundle:
    return classifier_bundle(loaded(name), 8)


def computation(graph: Graph) -> list[str]:
    """A digest of each output that depends on all operators, arguments, weights, shapes and element types, but not on names."""
    digests: dict[str, str] = {}

    def described(argument: object) -> object:
        if isinstance(argument, Value):
            return digests[argument.name]
        return [described(each) for each in argument] if isinstance(argument, tuple | list) else str(argument)

    def arguments(node: Node) -> list[object]:
        if node.kind not in ("call", "calls"):
            return [described(each) for each in node.args]
        expected = find_operator(node.target)._schema.arguments
        positional = [each for each in expected if not each.kwarg_only]
        left = [each.default_value for each in positional[len(node.args) :]]
        return [*(described(each) for each in node.args), *(described(each) for each in left)]

    for node in graph.nodes:
        target = node.name if node.kind == "input" else node.target
        said = (node.kind, target, arguments(node), sorted(node.kwargs.items(), key=str), node.dtype, node.shape)
        digests[node.name] = hashlib.sha256(repr(said).encode()).hexdigest()
    return [digests[name] for name in graph.outputs]


@pytest.mark.parametrize("name", ["resnet18", "resnext50_32x4d"])
def test_captured_layers_are_what_torch_export_captures(name: str) -> None:
    whole = load_model(name, "random:0", image_size=IMAGE_SIZE).classifier()
    example = torch.zeros((2, 3, IMAGE_SIZE, IMAGE_SIZE), dtype=torch.uint8)
    expected, weights = capture(whole, [example], ["input"], max_batch_size=8)
    found, ours = capture_layers(whole, "input", (3, IMAGE_SIZE, IMAGE_SIZE))
    assert computation(found) == computation(expected)
    assert {node.target for node in expected.weights} == ours.keys()
    assert all(torch.equal(ours[key], weights[key]) for key in ours)


def test_module_with_another_layer_is_not_captured() -> None:
    with pytest.raises(AssertionError, match="sigmoid"):
        capture_layers(nn.Sequential(nn.Sigmoid()), "input", (3, 8, 8))


def test_bundle_can_be_written_and_read(tmp_path: Path) -> None:
    bundle = bundle_of("resnet18")
    weights = bundle.weights(node.target for node in bundle.graph.weights)
    (output,) = bundle.build(bundle.graph)(bundle.self_test["input.input"])
    self_test = {**bundle.self_test, "boundary.0.0": output}
    write_bundle(tmp_path / "resnet", bundle.manifest, bundle.graph, weights, self_test)
    read = read_bundle(tmp_path / "resnet")
    assert read.graph == bundle.graph
    assert read.manifest.version == "random:1"


def test_graph_and_costs_do_not_depend_on_the_weights() -> None:
    one, other = (
        classifier_bundle(load_model("resnet18", f"random:{seed}", image_size=IMAGE_SIZE), 8) for seed in (3, 4)
    )
    assert one.graph == other.graph
    assert one.manifest.costs_s == other.manifest.costs_s


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_counted_costs_are_half_of_torch_flop_counts(name: str) -> None:
    counter = FlopCounterMode(display=False)
    with torch.device("meta"):
        model = get_model(name, num_classes=10).eval()
        with counter:
            model(torch.empty(1, 3, IMAGE_SIZE, IMAGE_SIZE))
    bare = LoadedModel(name, "1", model, ("label",) * 10, loaded("resnet18").preprocessing)
    graph, _ = capture_layers(bare.classifier(), "input", (3, IMAGE_SIZE, IMAGE_SIZE))
    counted = sum(block_costs_s(graph)) * _MULTIPLY_ADDS_PER_S
    assert 2 * counted == pytest.approx(counter.get_total_flops())


@pytest.mark.parametrize(("name", "blocks"), [("resnet18", 10), ("resnet50", 18)])
def test_resnet_is_cut_between_residual_blocks_only(name: str, blocks: int) -> None:
    bundle = bundle_of(name)
    costs_s = bundle.manifest.costs_s
    ends = [position for position, cost_s in enumerate(costs_s) if cost_s]
    assert len(ends) == blocks == count_blocks(name)
    names = [bundle.graph.nodes[position].name for position in ends]
    assert names[0] == "maxpool"
    assert all(name.startswith("layer") and "relu" in name for name in names[1:-2])
    assert names[-2:] == ["flatten", "softmax"]
    for num_stages in (2, 3, 6, blocks):
        cut = cut_graph(bundle.graph, costs_s, num_stages, bundle.manifest.lengths[-1])
        assert set(cut.positions) <= set(ends)
        assert max(cut.stage_s) <= sum(costs_s) / num_stages + max(costs_s)
        assert all(len(stage.inputs) == 1 for stage in bundle.graph.cut(cut.positions))
    with pytest.raises(ModelError, match=f"at most {blocks}; choose 1 to {blocks} stages"):
        cut_graph(bundle.graph, costs_s, blocks + 1, bundle.manifest.lengths[-1])


@pytest.mark.parametrize(("limit_s", "rounds"), [(0.0, 3), (1e9, 25)])
def test_nodes_are_measured_more_often_while_it_takes_little_time(
    monkeypatch: pytest.MonkeyPatch, limit_s: float, rounds: int
) -> None:
    bundle = bundle_of("resnet18")
    weights = bundle.weights(node.target for node in bundle.graph.weights)
    made: list[cutting._Timer] = []

    class Counting(cutting._Timer):
        def run(self, *inputs: Any, **options: Any) -> Any:
            made.append(self)
            return super().run(*inputs, **options)

    monkeypatch.setattr(cutting, "_Timer", Counting)
    monkeypatch.setattr(cutting, "_ROUNDS_S", limit_s)
    measure_nodes(bundle.graph, weights, [bundle.self_test["input.input"]])
    assert len(made) == 1 + rounds


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_compute_no_number_are_refused(value: float) -> None:
    model = load_model("resnet18", "random:0", image_size=IMAGE_SIZE)
    bias: Tensor = model.module.get_parameter("fc.bias")
    with torch.no_grad():
        bias[0] = value
    with pytest.raises(WeightsError, match="infinity or NaN"):
        plan_of(model, 1)
