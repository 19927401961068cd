"""The description of a bundle: `manifest.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from multiworld_serving.models.bundle.graph import MAX_NODES, Graph
from multiworld_serving.models.bundle.nodes import BATCH, Dtype, Shape, Size, TensorNode, bundle_errors
from multiworld_serving.models.errors import BundleError
from multiworld_serving.models.preprocessing import Preprocessing

FORMAT = 1
MAX_MANIFEST_BYTES = 16 << 20
MAX_BATCH_SIZE = 1024
_MAX_LENGTH = 1 << 31

NAME = re.compile(r"\A[A-Za-z0-9][A-Za-z0-9_.:+-]{0,99}\Z")
Name = Annotated[str, Meta(pattern=NAME.pattern)]
"""Name or version of a model."""
_PRINTABLE = r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]"
Line = Annotated[str, Meta(pattern=rf"\A{_PRINTABLE}*\Z", max_length=1024)]
"""Text without control characters and line breaks."""
Label = Annotated[str, Meta(pattern=rf"\A{_PRINTABLE}+\Z", max_length=200)]
"""A short `Line` that is not empty."""
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Length = Annotated[int, Meta(ge=0, lt=_MAX_LENGTH)]
Dimensions = Annotated[Mapping[Line, tuple[Length, Length]], Meta(max_length=64)]
"""(least, most) length of each variable dimension; BATCH is one of them."""


class TensorSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """An input or output of the model.

    Attributes:
        dtype: name of the element type, such as "float32".
        shape: (BATCH, …). A number is a fixed length, a text the name of a variable dimension, None a computed one.
    """

    name: Label
    dtype: Dtype
    shape: Shape

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join('?' if dim is None else str(dim) for dim in self.shape)}]"


Tensors = Annotated[tuple[TensorSpec, ...], Meta(max_length=64)]


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """See the module.

    Attributes:
        inputs, outputs: in the order of the graph.
        cuts: positions in the graph after which a stage ends; empty for one stage.
        costs_s: seconds per row of each node of the graph, estimated when the bundle was made. Other numbers of stages are cut by them,
            never after a node that takes no time.
        image: preprocessing of images, if the model takes one input of images: uint8 [B,3,crop_size,crop_size].
        labels: one per class, if the output is the probabilities of classes [B,…,classes]; else empty.
        made_with: the versions of the programs that made it, for people.
        sha256: digests of the other files, by file name.
        independent_rows: whether the export has proven that each row of a batch is computed independently of the others. Bundles of
            earlier releases lack it.
    """

    name: Name
    version: Name
    inputs: Tensors
    outputs: Tensors
    dimensions: Dimensions
    cuts: Annotated[tuple[Length, ...], Meta(max_length=1024)]
    costs_s: Annotated[tuple[Annotated[float, Meta(ge=0, le=1e12)], ...], Meta(max_length=MAX_NODES)]
    image: Preprocessing | None
    labels: Annotated[tuple[Line, ...], Meta(max_length=1 << 20)]
    made_with: Line
    sha256: Annotated[Mapping[Line, Digest], Meta(max_length=16)]
    independent_rows: bool = False

    @property
    def max_batch_size(self) -> int:
        return self.dimensions[BATCH][1]

    @property
    def lengths(self) -> tuple[dict[str, int], ...]:
        """Lengths of the variable dimensions for which a graph is checked: the least, nearly the least, and the largest."""
        return lengths_to_check(self.dimensions)

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode({"format": FORMAT} | msgspec.structs.asdict(self)), indent=1)

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Read a manifest. Raises BundleError."""
        with bundle_errors("invalid manifest of the bundle"):
            fields = msgspec.json.decode(text, type=dict[str, Any])
        if (found := fields.pop("format", None)) != FORMAT:
            raise _invalid(
                f"its format is {found!r:.20}, but this release reads format {FORMAT}; export the model again, or install the release that "
                "made it"
            )
        with bundle_errors("invalid manifest of the bundle"):
            manifest = msgspec.convert(fields, cls)
        lengths_to_check(manifest.dimensions)
        return manifest

    def check_batch_size(self, rows: int | None) -> None:
        """Raise BundleError if batches of so many rows are larger than the model was exported for."""
        if (rows or 1) > self.max_batch_size:
            raise BundleError(
                f"{self.name} computes batches of at most {self.max_batch_size}; choose a smaller --max-batch-size, or export it with a "
                "larger one"
            )

    def check_graph(self, graph: Graph) -> None:
        """Raise BundleError unless the graph has the inputs, outputs, dimensions and positions that the manifest names."""
        check_tensors(graph, self.inputs, self.outputs)
        unknown = {node.dimension for node in graph.nodes if isinstance(node, Size)} - self.dimensions.keys()
        if unknown:
            raise _invalid(f"the graph uses the dimension {sorted(unknown)[0]!r:.60}, which has no range")
        if any(each.shape[:1] != (BATCH,) for each in (*self.inputs, *self.outputs)):
            raise _invalid(f"dimension 0 of an input or output is not {BATCH!r}")
        if len(self.costs_s) != len(graph.nodes):
            raise _invalid(f"costs_s has {len(self.costs_s)} numbers for {len(graph.nodes)} nodes")
        graph.cut(self.cuts)
        if self.image is not None:
            size = self.image.crop_size
            if [(each.dtype, each.shape) for each in self.inputs] != [("uint8", (BATCH, 3, size, size))]:
                raise _invalid(f"a model with image preprocessing has one input, uint8 [{BATCH}, 3, {size}, {size}]")
        ends = [each.shape if self.image is not None else (BATCH, *each.shape[1:][-1:]) for each in self.outputs]
        if self.labels and ends != [(BATCH, len(self.labels))]:
            count = len(self.labels)
            raise _invalid(f"a model with labels has one output [{BATCH}, …, {count}], for images [{BATCH}, {count}]")


def lengths_to_check(dimensions: Mapping[str, tuple[int, int]]) -> tuple[dict[str, int], ...]:
    """See `Manifest.lengths`. Raises BundleError if a range is invalid or BATCH is missing."""
    for name, (least, most) in dimensions.items():
        limit = MAX_BATCH_SIZE if name == BATCH else _MAX_LENGTH
        if not 1 <= least <= most <= limit:
            raise _invalid(f"the dimension {name!r:.60} is {least} to {most}; expected a range within 1 to {limit}")
    if dimensions.get(BATCH, (0, 0))[0] != 1:
        raise _invalid(f"the dimension {BATCH!r} is missing or does not begin at 1")
    ranges = dimensions.items()
    return (
        {name: least for name, (least, _) in ranges},
        {name: min(least + 1, most) for name, (least, most) in ranges},
        {name: most for name, (_, most) in ranges},
    )


def spec_of(node: TensorNode) -> TensorSpec:
    """The description of a tensor of a graph."""
    return TensorSpec(node.name, node.dtype, node.shape)


def check_tensors(graph: Graph, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    """Raise BundleError unless these are the inputs and outputs of the graph. Names of outputs may differ."""
    found = [spec_of(graph.tensor(name)) for name in graph.outputs]
    if list(inputs) != [spec_of(node) for node in graph.inputs]:
        raise BundleError(f"the inputs differ from the graph's: {', '.join(map(str, inputs))!s:.150}")
    if [(each.dtype, each.shape) for each in outputs] != [(each.dtype, each.shape) for each in found]:
        raise BundleError(f"the outputs differ from the graph's: {', '.join(map(str, outputs))!s:.150}")


def _invalid(why: str) -> BundleError:
    return BundleError(f"invalid manifest of the bundle: {why}")
