"""The description of a bundle: `manifest.json`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from multiworld_serving.models.bundle.graph import MAX_NODES, Graph
from multiworld_serving.models.bundle.nodes import BATCH, Dim, Node
from multiworld_serving.models.errors import BundleError, PreprocessingError
from multiworld_serving.models.preprocessing import Preprocessing

FORMAT = 1
_INT8_FORMAT = 2
"""Of bundles that earlier releases made for int8, with a field more. It is ignored."""
MAX_MANIFEST_BYTES = 16 << 20
MAX_BATCH_SIZE = 1024
_MAX_LENGTH = 1 << 31
_MAX_LABELS = 1 << 20
_LABEL_CHARACTERS = 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:+-]{0,99}")
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and what UTF-8 cannot express."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of the model.

    Attributes:
        dtype: name of the element type, such as "float32".
        shape: (BATCH, …). A number is a fixed length, a text the name of a variable dimension, None a computed one.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join('?' if dim is None else str(dim) for dim in self.shape)}]"


@dataclass(frozen=True)
class Manifest:
    """See the module.

    Attributes:
        inputs, outputs: in the order of the graph.
        dimensions: (least, most) length of each variable dimension; BATCH is one of them.
        cuts: positions in the graph after which a stage ends; empty for one stage.
        costs_s: seconds per row of each node of the graph, estimated when the bundle was made. Other numbers of stages are cut by them,
            never after a node that takes no time.
        image: preprocessing of images, if the model takes one input of images: uint8 [B,3,crop_size,crop_size].
        labels: one per class, if the output is the probabilities of classes [B,classes]; else empty.
        made_with: the versions of the programs that made it, for people.
        sha256: digests of the other files, by file name.
    Raises:
        BundleError: a field is invalid.
    """

    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dimensions: Mapping[str, tuple[int, int]]
    cuts: tuple[int, ...]
    costs_s: tuple[float, ...]
    image: Preprocessing | None
    labels: tuple[str, ...]
    made_with: str
    sha256: Mapping[str, str]

    def __post_init__(self) -> None:
        check_name("name", self.name)
        check_name("version", self.version)
        lengths_to_check(self.dimensions)
        for tensor in (*self.inputs, *self.outputs):
            if tensor.shape[:1] != (BATCH,):
                raise _invalid(f"dimension 0 of {tensor.name!r:.60} is not {BATCH!r}")
        if len(self.costs_s) > MAX_NODES or not all(0 <= cost_s < math.inf for cost_s in self.costs_s):
            raise _invalid("costs_s contains a number that is not a time")
        if len(self.labels) > _MAX_LABELS or any(len(label) > _LABEL_CHARACTERS for label in self.labels):
            raise _invalid(f"labels: expected at most {_MAX_LABELS} of at most {_LABEL_CHARACTERS} characters")
        if any(not _SHA256.fullmatch(digest) for digest in self.sha256.values()):
            raise _invalid("sha256 contains a text that is not a SHA-256 digest")

    @property
    def max_batch_size(self) -> int:
        return self.dimensions[BATCH][1]

    @property
    def lengths(self) -> tuple[dict[str, int], ...]:
        """Lengths of the variable dimensions for which a graph is checked: the least, nearly the least, and the largest."""
        return lengths_to_check(self.dimensions)

    def to_json(self) -> str:
        fields = {"format": FORMAT} | asdict(self)
        return json.dumps(fields, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Read a manifest. Raises BundleError."""
        try:
            fields: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _invalid(f"not JSON ({error})") from error
        if not isinstance(fields, dict) or "format" not in fields:
            raise _invalid("it is not an object with a format")
        found = fields.pop("format")
        if found not in (FORMAT, _INT8_FORMAT):
            raise _invalid(
                f"this release reads format {FORMAT} and {_INT8_FORMAT}; export the model again, or install the release that made it"
            )
        known = [*cls.__dataclass_fields__, *(["int8"] if found == _INT8_FORMAT else [])]
        if fields.keys() != set(known):
            raise _invalid(f"expected the fields {', '.join(known)}; got {', '.join(map(str, fields))[:200]}")
        try:
            return cls(
                name=_text(fields["name"]),
                version=_text(fields["version"]),
                inputs=tensors_from(fields["inputs"]),
                outputs=tensors_from(fields["outputs"]),
                dimensions=dimensions_from(fields["dimensions"]),
                cuts=tuple(_integer(cut) for cut in _list(fields["cuts"], 1024)),
                costs_s=tuple(_number(cost) for cost in _list(fields["costs_s"], MAX_NODES)),
                image=None if fields["image"] is None else Preprocessing(**_object(fields["image"], 4)),
                labels=tuple(_text(label) for label in _list(fields["labels"], _MAX_LABELS)),
                made_with=_text(fields["made_with"])[:1000],
                sha256={_text(name): _text(digest) for name, digest in _object(fields["sha256"], 16).items()},
            )
        except (TypeError, PreprocessingError) as error:
            raise _invalid(str(error)) from error

    def check_graph(self, graph: Graph) -> None:
        """Raise BundleError unless the graph has the inputs, outputs, dimensions and positions that the manifest names."""
        for kind, told, found in (("inputs", self.inputs, graph.inputs), ("outputs", self.outputs, _outputs(graph))):
            expected = [(each.name, each.dtype, each.shape) for each in told]
            actual = [(each.name, each.dtype, each.shape) for each in map(spec_of, found)]
            if kind == "outputs":  # the graph's names are internal
                expected, actual = [each[1:] for each in expected], [each[1:] for each in actual]  # type: ignore[misc]
            if expected != actual:
                raise _invalid(f"the {kind} differ from the graph's: {str(expected)[:150]} and {str(actual)[:150]}")
        unknown = {node.target for node in graph.nodes if node.kind == "size"} - self.dimensions.keys()
        if unknown:
            raise _invalid(f"the graph uses the dimension {sorted(unknown)[0]!r:.60}, which has no range")
        if len(self.costs_s) != len(graph.nodes):
            raise _invalid(f"costs_s has {len(self.costs_s)} numbers for {len(graph.nodes)} nodes")
        graph.cut(self.cuts)
        if self.image is not None:
            size = self.image.crop_size
            if [(each.dtype, each.shape) for each in self.inputs] != [("uint8", (BATCH, 3, size, size))]:
                raise _invalid(f"a model with image preprocessing has one input, uint8 [{BATCH}, 3, {size}, {size}]")
        if self.labels and [each.shape for each in self.outputs] != [(BATCH, len(self.labels))]:
            raise _invalid(f"a model with labels has one output [{BATCH}, {len(self.labels)}]")


def check_name(field: str, text: str) -> None:
    """Raise BundleError unless this can be the name or version of a model."""
    if not _NAME.fullmatch(text):
        raise _invalid(f"{field} is {text!r:.60}; expected letters, digits and . _ : + -, at most 100")


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


def tensors_from(value: Any) -> tuple[TensorSpec, ...]:
    """Tensors from JSON. Raises BundleError, TypeError."""
    return tuple(map(_tensor, _list(value, 64)))


def dimensions_from(value: Any) -> dict[str, tuple[int, int]]:
    """Ranges of variable dimensions from JSON. Raises BundleError, TypeError."""
    return {_text(name): _range(bounds) for name, bounds in _object(value, 64).items()}


def spec_of(node: Node) -> TensorSpec:
    """The description of a tensor of a graph."""
    assert node.shape is not None
    return TensorSpec(node.name, str(node.dtype).removeprefix("torch."), node.shape)


def _outputs(graph: Graph) -> list[Any]:
    return [graph.by_name[name] for name in graph.outputs]


def _invalid(why: str) -> BundleError:
    return BundleError(f"invalid manifest of the bundle: {why}")


def _tensor(fields: Any) -> TensorSpec:
    match fields:
        case {"name": str(name), "dtype": str(dtype), "shape": [*shape], **others} if not others and len(shape) <= 8:
            if all(dim is None or isinstance(dim, str) or type(dim) is int for dim in shape):
                return TensorSpec(name, dtype, tuple(shape))
    raise _invalid(f"{str(fields)[:80]!r} does not describe a tensor by name, dtype and shape")


def _list(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise TypeError(f"{str(value)[:60]!r} is not a list of at most {most} items")
    return value


def _object(value: Any, most: int) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > most:
        raise TypeError(f"{str(value)[:60]!r} is not an object of at most {most} fields")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or _UNPRINTABLE.search(value):
        raise TypeError(f"{str(value)[:60]!r} is not text of one line")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_LENGTH:
        raise TypeError(f"{str(value)[:60]!r} is not a whole number from 0")
    return value


def _number(value: Any) -> float:
    if type(value) is not float and (type(value) is not int or abs(value) > _MAX_LENGTH):
        raise TypeError(f"{str(value)[:60]!r} is not a number")
    return float(value)


def _range(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise TypeError(f"{str(value)[:60]!r} is not [least, most]")
    return _integer(value[0]), _integer(value[1])
