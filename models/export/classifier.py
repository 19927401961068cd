"""Makes bundles of loaded image classifiers, for `multiworld serve --model resnet50`. They are as those that `multiworld export` makes."""

from __future__ import annotations

import math

import torch

from multiworld_serving.models.bundle.files import Bundle, WeightsFile
from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.manifest import Manifest, TensorSpec, spec_of
from multiworld_serving.models.bundle.nodes import BATCH, Node
from multiworld_serving.models.export.layers import capture_layers
from multiworld_serving.models.weights.loading import LoadedModel

_MULTIPLY_ADDS_PER_S = 5e10
"""Assumed speed of a worker. Balances computing against the bytes that cross a cut."""
_MULTIPLYING = ("aten.conv2d.default", "aten.linear.default")


def classifier_bundle(model: LoadedModel, max_batch_size: int) -> Bundle:
    """A bundle of one stage, with its weights in a temporary file without a name.

    The graph and its costs are the same for all weights of an architecture, and on every machine. Of the self-test there is the input only.
    """
    image = model.preprocessing
    graph, weights = capture_layers(model.classifier(), "input", (3, image.crop_size, image.crop_size))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 256, (1, 3, image.crop_size, image.crop_size), dtype=torch.uint8, generator=generator)
    manifest = Manifest(
        name=model.name,
        version=model.version,
        inputs=tuple(map(spec_of, graph.inputs)),
        outputs=(TensorSpec("probabilities", "float32", (BATCH, model.num_classes)),),
        dimensions={BATCH: (1, max_batch_size)},
        cuts=(),
        costs_s=block_costs_s(graph),
        image=image,
        labels=model.labels,
        made_with=f"torch {torch.__version__}",
        sha256={},
    )
    return Bundle(manifest, graph, {"input.input": rows}, WeightsFile.of(weights))


def block_costs_s(graph: Graph) -> tuple[float, ...]:
    """Estimated seconds per row of each block, at its last node; 0 for all other nodes, so that nothing is cut within a block.

    A block ends before a convolution or linear layer where a single tensor crosses: a residual block, or the layers before the first
    or after the last one. Counts multiply-adds, as is usual in papers; the other operations are roughly proportional.
    """
    costs_s, counted = [0.0] * len(graph.nodes), 0
    steps = [position for position, node in enumerate(graph.nodes) if node.kind in ("call", "calls", "item")]
    for position, following in zip(steps, [*steps[1:], None], strict=True):
        counted += _multiply_adds(graph, graph.nodes[position])
        ends = following is None or graph.nodes[following].target in _MULTIPLYING
        if ends and counted and len(graph.live_after(position) or ()) <= 1:
            costs_s[position], counted = counted / _MULTIPLY_ADDS_PER_S, 0
    return tuple(costs_s)


def _multiply_adds(graph: Graph, node: Node) -> int:
    if node.target not in _MULTIPLYING:
        return 0
    weight = graph.by_name[node.args[1].name]
    assert weight.shape is not None
    assert node.dtype is not None
    per_output = math.prod(dim for dim in weight.shape[1:] if isinstance(dim, int))
    return per_output * node.row_bytes() // node.dtype.itemsize
