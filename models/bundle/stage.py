"""A stage of a bundle as it travels to a worker: a description, and a safetensors file with the weights and the graph."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError
from torch import Tensor, fx, nn

from multiworld_serving.models.bundle.checking import check_graph
from multiworld_serving.models.bundle.graph import MAX_GRAPH_BYTES, Graph
from multiworld_serving.models.bundle.manifest import (
    Digest,
    Dimensions,
    Manifest,
    Name,
    Tensors,
    check_tensors,
    lengths_to_check,
    spec_of,
)
from multiworld_serving.models.bundle.nodes import BATCH, DTYPES, bundle_errors
from multiworld_serving.models.bundle.rows import RowFormat
from multiworld_serving.models.errors import BundleError, StageError, WeightsError
from multiworld_serving.models.weights.tensor_file import TensorEntry, TensorFile, file_head

MAX_STAGES = 1024
_GRAPH = "graph"


class BundleStageSpec(Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """A stage of a bundle, without graph and weights.

    Attributes:
        model, version: of the manifest.
        inputs, outputs: the tensors that cross its boundaries.
        dimensions: (least, most) length of each variable dimension.
        probabilities: the output is the probabilities of classes.
        graph_sha256: digest of the graph's JSON.
    Raises:
        StageError: a field is invalid.
    """

    model: Name
    version: Name
    index: int
    num_stages: int
    inputs: Tensors
    outputs: Tensors
    dimensions: Dimensions
    probabilities: bool
    graph_sha256: Digest

    def __post_init__(self) -> None:
        if not 1 <= self.num_stages <= MAX_STAGES or not 0 <= self.index < self.num_stages:
            raise StageError(f"stage {self.index} of {self.num_stages}; expected a stage of 1 to {MAX_STAGES}")
        try:
            lengths_to_check(self.dimensions)
            self.input_rows  # noqa: B018 - checks
            self.output_rows  # noqa: B018 - checks
        except BundleError as error:
            raise StageError(f"stage {self.index} of {self.model:.60}: {error}") from error

    @cached_property
    def input_rows(self) -> RowFormat:
        """How the input travels."""
        return RowFormat(self.inputs, self.dimensions)

    @cached_property
    def output_rows(self) -> RowFormat:
        """How the output travels."""
        return RowFormat(self.outputs, self.dimensions)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of what crosses its boundaries, for people."""
        return tuple(dict.fromkeys((self.inputs[0].name, self.outputs[0].name)))

    @property
    def part(self) -> str:
        """16 hexadecimal digits that identify this part of the model, whichever version of the weights it has."""
        return hashlib.sha256(msgspec.structs.replace(self, version="any").to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> BundleStageSpec:
        """The description that `to_json` wrote.

        Raises:
            StageError: it is not JSON, or a field is missing, unknown or invalid.
        """
        try:
            with bundle_errors("stage description is invalid"):
                return msgspec.json.decode(text, type=cls)
        except BundleError as error:
            raise StageError(f"{error} (do leader and worker run the same release?)") from error

    def example(self, count: int) -> Tensor:
        """Rows of zeros, with variable dimensions of their largest lengths."""
        lengths = {BATCH: count} | {name: most for name, (_, most) in self.dimensions.items() if name != BATCH}
        shapes = ([dim if isinstance(dim, int) else lengths[str(dim)] for dim in each.shape] for each in self.inputs)
        zeros = [torch.zeros(shape, dtype=DTYPES[each.dtype]) for shape, each in zip(shapes, self.inputs, strict=True)]
        return self.input_rows.pack(zeros)


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
        StageError: a tensor that crosses a boundary has no rows.
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
            graph_sha256=hashlib.sha256(stage.to_json().encode()).hexdigest(),
        )
        for index, stage in enumerate(stages)
    ]


def weights_head(graph: str, entries: Mapping[str, TensorEntry]) -> bytes:
    """The beginning of the safetensors file of a stage, with its graph as metadata. The weights follow in the order of `entries`.

    Args:
        graph: its JSON.
    """
    return file_head(entries, {_GRAPH: graph})


def load_bundle_stage(spec: BundleStageSpec, weights: TensorFile) -> BundleStage:
    """Build a stage on the CPU from what a leader has sent. Nothing of the graph is run before all of it is checked.

    Args:
        weights: the file; the stage maps its memory.
    Raises:
        BundleError, WeightsError: the file is not a stage, or it does not match `spec`.
    """
    try:
        with weights.tensors() as file:
            graph = _checked_graph(spec, (file.metadata() or {}).get(_GRAPH, ""))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"the received weights cannot be read: {' '.join(str(error).split())[:300]}") from error
    return BundleStage(spec, graph.build(tensors, torch.device("cpu")))


def _checked_graph(spec: BundleStageSpec, text: str) -> Graph:
    if not text or len(text) > MAX_GRAPH_BYTES:
        raise BundleError(f"the weights of stage {spec.index} come without a graph")
    if (found := hashlib.sha256(text.encode()).hexdigest()) != spec.graph_sha256:
        raise BundleError(f"the graph of stage {spec.index} has the SHA-256 hash {found}; expected {spec.graph_sha256}")
    graph = Graph.from_json(text)
    check_graph(graph, lengths_to_check(spec.dimensions))
    check_tensors(graph, spec.inputs, spec.outputs)
    return graph
