"""A stage of a bundle as it travels to a worker: a description, and bytes with the graph and the weights.

The bytes are the length of the graph in 8 bytes, its JSON, spaces, and the weights in the order of `weights_in_order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec
import torch
from msgspec import Struct
from torch import Tensor, fx, nn

from multiworld_serving.models.bundle.checking import check_graph
from multiworld_serving.models.bundle.graph import MAX_GRAPH_BYTES, Graph
from multiworld_serving.models.bundle.manifest import (
    Dimensions,
    Manifest,
    Name,
    Tensors,
    check_tensors,
    lengths_to_check,
    spec_of,
)
from multiworld_serving.models.bundle.nodes import BATCH, DTYPES, Weight
from multiworld_serving.models.bundle.rows import RowFormat
from multiworld_serving.models.errors import BundleError, StageSpecError, WeightsError

MAX_STAGES = 1024
_LENGTH_BYTES = 8
_ALIGNED_BYTES = 64
"""Alignment of the first weight. With less, some processors compute other roundings than for the whole model."""


class PlacedSpec(Struct, frozen=True):
    """The place of a stage among all."""

    index: int
    num_stages: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


class BundleStageSpec(PlacedSpec, frozen=True, dict=True, forbid_unknown_fields=True, tag="bundle"):
    """A stage of a bundle, without graph and weights.

    Attributes:
        model, version: of the manifest.
        inputs, outputs: the tensors that cross its boundaries.
        dimensions: (least, most) length of each variable dimension.
        probabilities: the output is the probabilities of classes.
    Raises:
        StageSpecError: a field is invalid.
    """

    model: Name
    version: Name
    inputs: Tensors
    outputs: Tensors
    dimensions: Dimensions
    probabilities: bool

    def __post_init__(self) -> None:
        if not 1 <= self.num_stages <= MAX_STAGES or not 0 <= self.index < self.num_stages:
            raise StageSpecError(f"stage {self.index} of {self.num_stages}; expected a stage of 1 to {MAX_STAGES}")
        try:
            lengths_to_check(self.dimensions)
            self.input_rows  # noqa: B018 - checks
            self.output_rows  # noqa: B018 - checks
        except BundleError as error:
            raise StageSpecError(f"stage {self.index} of {self.model:.60}: {error}") from error

    @cached_property
    def input_rows(self) -> RowFormat:
        """How the input travels."""
        return RowFormat(self.inputs, self.dimensions)

    @cached_property
    def output_rows(self) -> RowFormat:
        """How the output travels."""
        return RowFormat(self.outputs, self.dimensions)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of what crosses its boundaries, for people."""
        return tuple(dict.fromkeys((self.inputs[0].name, self.outputs[0].name)))

    def example(self, count: int) -> Tensor:
        """Deterministic rows, with variable dimensions of their largest lengths.

        They have random pixels, random activations after a ReLU, and 1 for other integers: an index, or a mask.
        """
        generator = torch.Generator().manual_seed(1)
        lengths = {BATCH: count} | {name: most for name, (_, most) in self.dimensions.items() if name != BATCH}
        tensors = []
        for each in self.inputs:
            dims = [dim if isinstance(dim, int) else lengths[str(dim)] for dim in each.shape]
            tensor = torch.ones(dims, dtype=DTYPES[each.dtype])
            if tensor.is_floating_point():
                tensor.normal_(generator=generator).relu_()
            elif tensor.dtype == torch.uint8 and tensor.dim() == 4:
                tensor.random_(0, 256, generator=generator)
            tensors.append(tensor)
        return self.input_rows.pack(tensors)


class BundleStage(nn.Module):
    """Computes a stage: rows in, rows out, as `RowFormat` describes. The module inside takes and returns the tensors.

    `forward` raises BundleError for rows of another format.
    """

    def __init__(self, spec: BundleStageSpec, module: fx.GraphModule) -> None:
        super().__init__()
        self.spec = spec
        self.module = module
        self.eval().requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        outputs = self.module(*self.spec.input_rows.unpack(rows))
        return self.spec.output_rows.pack([each.contiguous() for each in outputs])


def stage_specs(manifest: Manifest, stages: Sequence[Graph]) -> list[BundleStageSpec]:
    """The descriptions of the stages into which a bundle's graph was cut.

    Raises:
        StageSpecError: a tensor that crosses a boundary has no rows.
    """
    return [
        BundleStageSpec(
            model=manifest.name,
            version=manifest.version,
            index=index,
            num_stages=len(stages),
            inputs=tuple(map(spec_of, stage.inputs)),
            outputs=manifest.outputs
            if stage is stages[-1]
            else tuple(spec_of(stage.tensor(name)) for name in stage.outputs),
            dimensions=manifest.dimensions,
            probabilities=stage is stages[-1] and bool(manifest.labels),
        )
        for index, stage in enumerate(stages)
    ]


def weights_in_order(graph: Graph) -> list[Weight]:
    """The weights of a stage in the order in which they travel: the largest elements first, so that each weight is aligned to them."""
    return sorted({node.key: node for node in graph.weights}.values(), key=lambda node: -DTYPES[node.dtype].itemsize)


def stage_head(graph: Graph) -> bytes:
    """The bytes of a stage before its weights."""
    text = graph.to_json().encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNED_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def load_bundle_stage(spec: BundleStageSpec, sent: Tensor) -> BundleStage:
    """Build a stage on the CPU from what a leader has sent. Nothing of the graph is run before all of it is checked.

    Args:
        sent: the bytes, uint8 [N]. The stage shares their memory.
    Raises:
        BundleError, WeightsError: they are not a stage, or do not match `spec`.
    """
    at = _LENGTH_BYTES + int.from_bytes(sent[:_LENGTH_BYTES].numpy().tobytes(), "little")
    if not _LENGTH_BYTES < at <= min(len(sent), _LENGTH_BYTES + MAX_GRAPH_BYTES):
        raise BundleError(f"the weights of stage {spec.index} come without a graph")
    graph = Graph.from_json(sent[_LENGTH_BYTES:at].numpy().tobytes())
    check_graph(graph, lengths_to_check(spec.dimensions))
    check_tensors(graph, spec.inputs, spec.outputs)
    if len(sent) != at + graph.weights_bytes:
        raise WeightsError(f"stage {spec.index} has {len(sent) - at} bytes of weights; expected {graph.weights_bytes}")
    tensors: dict[str, Tensor] = {}
    for node in weights_in_order(graph):
        tensor = sent[at : at + node.row_bytes()].view(DTYPES[node.dtype])
        tensors[node.key] = tensor.view(node.empty().shape)
        at += tensor.nbytes
    return BundleStage(spec, graph.build(tensors, torch.device("cpu")))
