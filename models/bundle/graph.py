"""A model as data: nodes that apply allow-listed operators to named values. Reads, cuts and rebuilds it without running any code of it.

The JSON form has one row per node, in the order of computation:

    ["input",   name, dtype, shape]                          a tensor that the caller passes
    ["weight",  name, dtype, shape, key]                     a tensor of the weights file
    ["size",    name, dimension]                             the length of a variable dimension, such as "batch"
    ["call",    name, dtype, shape, operator, args, kwargs]  an operator that returns a tensor
    ["calls",   name, operator, args, kwargs]                an operator that returns several tensors; `item` picks one
    ["item",    name, dtype, shape, value, index]            one of several tensors
    ["integer", name, operator, args]                        arithmetic on sizes
    ["output",  [name, …]]                                   last row

A shape has a number for a fixed dimension, a name for a variable one, and null for a dimension computed from variable ones. Arguments are
JSON values; `{"value": name}` refers to an earlier node, and `{"dtype": …}`, `{"float": …}`, `{"memory_format": …}`, `{"layout": …}` and
`{"device": null}` stand for what JSON cannot express. Floats are written as text so that infinity and every bit survive.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Annotated

import msgspec
import torch
from msgspec import Meta, Struct
from torch import Tensor, fx, nn

from multiworld_serving.models.bundle.nodes import (
    MAX_ITEMS,
    Call,
    Calls,
    Input,
    Integer,
    Item,
    Node,
    Size,
    TensorNode,
    Weight,
    bundle_errors,
    literal,
)
from multiworld_serving.models.bundle.operators import INTEGER_OPERATORS, find_operator
from multiworld_serving.models.bundle.signatures import dividing, expect_shapes, guarded
from multiworld_serving.models.errors import BundleError

MAX_GRAPH_BYTES = 64 << 20
MAX_NODES = 20_000
_VIEWS = dict.fromkeys(("aten.view.default", "aten._unsafe_view.default"), "aten.reshape.default")
"""Operators that are built as others: whether a view is possible depends on strides, and these on the device."""


class _OutputRow(Struct, tag="output", array_like=True, forbid_unknown_fields=True):
    names: Annotated[list[str], Meta(max_length=MAX_ITEMS)]


_Row = Input | Weight | Size | Integer | Call | Calls | Item | _OutputRow
_ROWS = msgspec.json.Decoder(Annotated[list[_Row], Meta(min_length=2, max_length=MAX_NODES)])


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of computation, and the names of the outputs.

    Raises:
        BundleError: an operator is not allowed or has other arguments, a node uses a name that no earlier node has, two nodes have one
            name, or an output is not a tensor.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        known: dict[str, Node] = {}
        for node in self.nodes:
            if node.name in known:
                raise BundleError(f"invalid graph: two nodes are named {node.name!r}")
            for name in node.operands:
                if name not in known:
                    raise BundleError(
                        f"invalid graph: {node.name!r} uses {name!r:.60}, which is not computed before it"
                    )
            if isinstance(node, Call | Calls):
                arguments = {argument.name for argument in find_operator(node.target)._schema.arguments}
                if not arguments.issuperset(node.kwargs):  # torch checks the rest when the shapes are computed
                    raise BundleError(f"invalid graph: the arguments of {node.name!r} are not those of {node.target}")
            if isinstance(node, Item) and not isinstance(known[node.value], Calls):
                raise BundleError(f"invalid graph: {node.name!r} is an item of something else than several tensors")
            known[node.name] = node
        for name in self.outputs:
            if not isinstance(known.get(name), TensorNode):
                raise BundleError(f"invalid graph: the output {name!r:.60} is not a tensor of the graph")
        if not self.outputs:
            raise BundleError("invalid graph: it has no output")

    @cached_property
    def by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    def tensor(self, name: str) -> TensorNode:
        """The node with this name, which is a tensor."""
        node = self.by_name[name]
        assert isinstance(node, TensorNode)
        return node

    @property
    def inputs(self) -> tuple[Input, ...]:
        return tuple(node for node in self.nodes if isinstance(node, Input))

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(node for node in self.nodes if isinstance(node, Weight))

    @property
    def weights_bytes(self) -> int:
        """Of the weights; tied ones count once."""
        return sum({node.key: node.row_bytes() for node in self.weights}.values())

    # -- JSON ------------------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        rows: list[Node | _OutputRow] = [*self.nodes, _OutputRow(list(self.outputs))]
        return "[\n" + ",\n".join(msgspec.json.encode(row).decode() for row in rows) + "\n]"

    @classmethod
    def from_json(cls, text: str | bytes) -> Graph:
        """Read a graph. Evaluates nothing.

        Raises:
            BundleError: it is not a graph of allow-listed operators.
        """
        if len(text) > MAX_GRAPH_BYTES:
            raise BundleError(f"invalid graph: it has {len(text)} bytes; at most {MAX_GRAPH_BYTES} are allowed")
        with bundle_errors("invalid graph"):
            *rows, last = _ROWS.decode(text)
        nodes = tuple(row for row in rows if isinstance(row, Node))
        if not isinstance(last, _OutputRow) or len(nodes) < len(rows):
            raise BundleError('invalid graph: only the last row is ["output", [name, …]]')
        return cls(nodes, tuple(last.names))

    # -- cutting ---------------------------------------------------------------------------------------------------------------

    def live_after(self, position: int) -> tuple[str, ...] | None:
        """Names of the tensors that nodes after `position` use, without weights and sizes: what crosses a cut there.

        None if it is impossible to cut there, because later nodes need something else than tensors with one row for each row of the
        batch and sizes of their dimensions.
        """
        last_use, recomputed = self._last_use, self._recomputed
        live = [
            node
            for node in self.nodes[: position + 1]
            if last_use[node.name] > position and node.name not in recomputed
        ]
        rows = [node for node in live if isinstance(node, TensorNode) and node.has_rows]
        dimensions = {dim for node in rows for dim in node.shape}
        needed = {dim for name, dims in recomputed.items() if last_use[name] > position for dim in dims}
        return tuple(node.name for node in live) if live and len(rows) == len(live) and needed <= dimensions else None

    @cached_property
    def _last_use(self) -> dict[str, int]:
        """The position of the last node that uses each node and is not recomputed. -1: there is none."""
        found = dict.fromkeys(self.by_name, -1)
        for position, node in enumerate(self.nodes):
            if node.name not in self._recomputed:
                found |= dict.fromkeys(node.operands, position)
        return found | dict.fromkeys(self.outputs, len(self.nodes))

    @cached_property
    def _recomputed(self) -> dict[str, set[str]]:
        """The nodes that depend on weights and sizes only, with the dimensions of these sizes. Each stage that needs them computes them."""
        found: dict[str, set[str]] = {}
        for node in self.nodes:
            if not isinstance(node, Input) and all(name in found for name in node.operands):
                own = {node.dimension} if isinstance(node, Size) else set()
                found[node.name] = own.union(*(found[name] for name in node.operands))
        return found

    def cut(self, positions: Sequence[int]) -> tuple[Graph, ...]:
        """The stages between these positions. The inputs of each are the outputs of the one before.

        Raises:
            BundleError: it is impossible to cut there.
        """
        ends = [-1, *positions, len(self.nodes) - 1]
        if any(first >= second for first, second in pairwise(ends)):
            raise BundleError(f"invalid cuts: expected ascending positions below {len(self.nodes) - 1}")
        stages: list[Graph] = []
        inputs = self.inputs
        for position in ends[1:]:
            crossing = self.outputs if position == ends[-1] else self.live_after(position)
            if crossing is None:
                raise BundleError(f"the graph cannot be cut after {self.nodes[position].name!r}")
            stages.append(self._stage(inputs, position, crossing))
            inputs = tuple(Input(name, self.tensor(name).dtype, self.tensor(name).shape) for name in crossing)
        return tuple(stages)

    def _stage(self, inputs: Sequence[Input], end: int, outputs: tuple[str, ...]) -> Graph:
        """What the outputs depend on, from these inputs to the node at `end`."""
        known, used = {node.name for node in inputs}, set(outputs)
        nodes: list[Node] = []
        for node in reversed(self.nodes[: end + 1]):
            if node.name in used and node.name not in known:
                nodes.append(node)
                used.update(node.operands)
        return Graph((*inputs, *reversed(nodes)), outputs)

    # -- building --------------------------------------------------------------------------------------------------------------

    def build(self, weights: Mapping[str, Tensor], device: torch.device) -> fx.GraphModule:
        """A module that takes the inputs and returns the tuple of outputs. The weights are not copied.

        Names of the module's attributes and variables are made here, so that no text of the graph becomes code.

        Raises:
            BundleError: a weight is missing or has another dtype or shape.
        """
        root, graph = nn.Module(), fx.Graph()
        values: dict[str, fx.Node] = {}
        attributes: dict[str, str] = {}
        for node in self.nodes:
            match node:
                case Input():
                    made = graph.placeholder(f"input_{len(values)}")
                case Weight(key=key):
                    if key not in attributes:
                        attributes[key] = f"weight_{len(attributes)}"
                        root.register_buffer(attributes[key], node.check(weights.get(key)))
                    made = graph.get_attr(attributes[key])
                case Size(dimension=dimension):
                    source, dim = self._source_of(dimension)
                    made = graph.call_function(torch.ops.aten.sym_size.int, (values[source], dim))
                case Integer(target=target, args=args):
                    made = graph.call_function(INTEGER_OPERATORS[target], literal(args, values, device))
                case Item(value=value, index=index):
                    made = graph.call_function(operator.getitem, (values[value], index))
                case Call(target=target, args=args, kwargs=kwargs) | Calls(target=target, args=args, kwargs=kwargs):
                    given = {name: literal(value, values, device) for name, value in kwargs.items()}
                    operator_ = find_operator(_VIEWS.get(target, target))
                    if "device" in {argument.name for argument in operator_._schema.arguments}:
                        given["device"] = device
                    if relied_on := guarded(node, self.by_name):
                        operands = (values[each.name] for each in relied_on)
                        graph.call_function(expect_shapes, (tuple(each.shape for each in relied_on), *operands))
                    integers = isinstance(node, Call) and "int" in node.dtype
                    function = dividing(target, operator_, integers)
                    made = graph.call_function(function, literal(args, values, device), given)
            values[node.name] = made
        graph.output(tuple(values[name] for name in self.outputs))
        return fx.GraphModule(root, graph)

    def _source_of(self, dimension: str) -> tuple[str, int]:
        """An input that has this variable dimension, and its index in the input's shape."""
        for node in self.inputs:
            if dimension in node.shape:
                return node.name, node.shape.index(dimension)
        raise BundleError(f"invalid graph: no input has the dimension {dimension!r}")
