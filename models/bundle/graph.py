"""A model as data: nodes that apply allow-listed operators to named values. Reads, cuts and rebuilds it without running any code of it.

The JSON form has one row per node, in the order of computation:

    ["input",   name, dtype, shape]                          a tensor that the caller passes
    ["weight",  name, dtype, shape, key]                     a tensor of the weights file
    ["size",    name, dimension]                             the length of a variable dimension, such as "batch"
    ["call",    name, dtype, shape, operator, args, kwargs]  an operator that returns a tensor
    ["calls",   name, operator, args, kwargs]                an operator that returns several tensors; `item` picks one
    ["item",    name, dtype, shape, value, index]            one of several tensors
    ["integer", name, operator, args]                        arithmetic on sizes
    ["range",   name, least, most]                           ignored; earlier releases wrote it for int8
    ["output",  [name, …]]                                   last row

A shape has a number for a fixed dimension, a name for a variable one, and null for a dimension computed from variable ones. Arguments are
JSON values; `{"value": name}` refers to an earlier node, and `{"dtype": …}`, `{"float": …}`, `{"memory_format": …}`, `{"layout": …}` and
`{"device": null}` stand for what JSON cannot express. Floats are written as text so that infinity and every bit survive.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from multiworld_serving.models.bundle.nodes import MAX_ITEMS, Device, Node, Value, node_from, row_of
from multiworld_serving.models.bundle.operators import INTEGER_OPERATORS, find_operator
from multiworld_serving.models.errors import BundleError

MAX_GRAPH_BYTES = 64 << 20
MAX_NODES = 20_000
_VIEWS = dict.fromkeys(("aten.view.default", "aten._unsafe_view.default"), "aten.reshape.default")
"""Operators that are built as others: whether a view is possible depends on strides, and these on the device."""


@dataclass(frozen=True)
class Graph:
    """Nodes in the order of computation, and the names of the outputs.

    Raises:
        BundleError: a node uses a name that no earlier node has, two nodes have one name, or an output is not a tensor.
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
                    raise BundleError(f"invalid graph: {node.name!r} uses {name!r}, which is not computed before it")
            known[node.name] = node
        for name in self.outputs:
            if name not in known or not known[name].is_tensor:
                raise BundleError(f"invalid graph: the output {name!r} is not a tensor of the graph")
        if not self.outputs:
            raise BundleError("invalid graph: it has no output")

    @cached_property
    def by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @property
    def inputs(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind == "input")

    @property
    def weights(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind == "weight")

    # -- JSON ------------------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        rows = [*map(row_of, self.nodes), ["output", list(self.outputs)]]
        return "[\n" + ",\n".join(json.dumps(row, allow_nan=False, separators=(",", ":")) for row in rows) + "\n]"

    @classmethod
    def from_json(cls, text: str | bytes) -> Graph:
        """Read a graph. Evaluates nothing.

        Raises:
            BundleError: it is not a graph of allow-listed operators.
        """
        if len(text) > MAX_GRAPH_BYTES:
            raise BundleError(f"invalid graph: it has {len(text)} bytes; at most {MAX_GRAPH_BYTES} are allowed")
        try:
            rows: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"invalid graph: not JSON ({error})") from error
        if not isinstance(rows, list) or not 2 <= len(rows) <= MAX_NODES:
            raise BundleError(f"invalid graph: expected a list of 2 to {MAX_NODES} rows")
        nodes = tuple(node_from(row) for row in rows[:-1] if not (isinstance(row, list) and row[:1] == ["range"]))
        match rows[-1]:
            case ["output", [*names]] if len(names) <= MAX_ITEMS and all(isinstance(name, str) for name in names):
                return cls(nodes, tuple(names))
        raise BundleError('invalid graph: the last row is not ["output", [name, …]]')

    # -- cutting ---------------------------------------------------------------------------------------------------------------

    def live_after(self, position: int) -> tuple[str, ...] | None:
        """Names of the tensors that nodes after `position` use, without weights and sizes: what crosses a cut there.

        None if it is impossible to cut there, because later nodes need something else than tensors with one row for each row of the
        batch and sizes of their dimensions.
        """
        return self._crossing[position]

    @cached_property
    def _crossing(self) -> list[tuple[str, ...] | None]:
        last_use = {name: len(self.nodes) for name in self.outputs}
        for position in reversed(range(len(self.nodes))):
            for name in self.nodes[position].operands:
                last_use.setdefault(name, position)
        recomputed = self._recomputed
        dimensions_needed: list[set[str]] = [set() for _ in self.nodes]
        needed = set().union(
            *(self._dimensions_of(self.by_name[name], set()) for name in self.outputs if name in recomputed)
        )
        for position in reversed(range(len(self.nodes))):
            dimensions_needed[position] = set(needed)
            needed |= self._dimensions_of(self.nodes[position], recomputed)
        found: list[tuple[str, ...] | None] = []
        live: dict[str, Node] = {}
        for position, node in enumerate(self.nodes):
            if last_use.get(node.name, -1) > position and node.name not in recomputed:
                live[node.name] = node
            for name in node.operands:
                if last_use.get(name, -1) <= position:
                    live.pop(name, None)
            dimensions = {dim for each in live.values() for dim in each.shape or () if isinstance(dim, str)}
            possible = live and all(each.has_rows for each in live.values())
            found.append(tuple(live) if possible and dimensions_needed[position] <= dimensions else None)
        return found

    @cached_property
    def _recomputed(self) -> set[str]:
        """Names of the nodes that depend on weights and sizes only. Each stage that needs them computes them again."""
        found: set[str] = set()
        for node in self.nodes:
            if node.kind != "input" and found.issuperset(node.operands):
                found.add(node.name)
        return found

    def _dimensions_of(self, node: Node, recomputed: set[str]) -> set[str]:
        """The variable dimensions that a node needs, directly or through recomputed nodes."""
        found, pending = set(), list(node.operands) if node.name not in recomputed else []
        while pending:
            operand = self.by_name[pending.pop()]
            if operand.kind == "size":
                found.add(operand.target)
            elif operand.name in recomputed:
                pending += operand.operands
        return found

    def cut(self, positions: Sequence[int]) -> tuple[Graph, ...]:
        """The stages between these positions, each a graph whose inputs are the outputs of the one before.

        Raises:
            BundleError: it is impossible to cut there.
        """
        ends = [-1, *positions, len(self.nodes) - 1]
        if any(first >= second for first, second in pairwise(ends)):
            raise BundleError(f"invalid cuts: expected ascending positions below {len(self.nodes) - 1}")
        stages: list[Graph] = []
        inputs, start = list(self.inputs), 0
        for position in (*positions, len(self.nodes) - 1):
            last = position == len(self.nodes) - 1
            crossing = self.outputs if last else self.live_after(position)
            if crossing is None:
                raise BundleError(f"the graph cannot be cut after {self.nodes[position].name!r}")
            stages.append(self._stage(inputs, self.nodes[start : position + 1], crossing))
            inputs = [replace(self.by_name[name], kind="input", target="", args=(), kwargs={}) for name in crossing]
            start = position + 1
        return tuple(stages)

    def _stage(self, inputs: Sequence[Node], nodes: Sequence[Node], outputs: tuple[str, ...]) -> Graph:
        body = {node.name: node for node in nodes if node.kind != "input"}
        known = {node.name for node in inputs}
        needed: dict[str, None] = {}

        def need(name: str) -> None:
            """Add a node after the nodes that it uses."""
            pending = [name]
            while pending:
                current = pending[-1]
                missing = [each for each in self.by_name[current].operands if each not in known and each not in needed]
                if current in known or current in needed:
                    pending.pop()
                elif missing:
                    pending += missing
                else:
                    needed[current] = None
                    pending.pop()

        for name in (*(name for name, node in body.items() if node.kind in ("call", "calls", "item")), *outputs):
            need(name)
        used: set[str] = set(outputs)
        kept: list[Node] = []
        for name in reversed(needed):  # without what no output depends on
            if name in used:
                kept.append(self.by_name[name])
                used.update(self.by_name[name].operands)
        nodes = (*inputs, *reversed(kept))
        return Graph(nodes, outputs)

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
            match node.kind:
                case "input":
                    made = graph.placeholder(f"input_{len(values)}")
                case "weight":
                    if node.target not in attributes:
                        attributes[node.target] = f"weight_{len(attributes)}"
                        root.register_buffer(attributes[node.target], _weight(weights, node))
                    made = graph.get_attr(attributes[node.target])
                case "size":
                    source, dim = self._source_of(node.target)
                    made = graph.call_function(torch.ops.aten.sym_size.int, (values[source], dim))
                case "integer":
                    made = graph.call_function(INTEGER_OPERATORS[node.target], _fx_arguments(node.args, values, device))
                case "item":
                    made = graph.call_function(operator.getitem, (values[node.args[0].name], int(node.target)))
                case _:
                    kwargs = {name: _fx_arguments(value, values, device) for name, value in node.kwargs.items()}
                    made = graph.call_function(
                        find_operator(_VIEWS.get(node.target, node.target)),
                        _fx_arguments(node.args, values, device),
                        kwargs,
                    )
            values[node.name] = made
        graph.output(tuple(values[name] for name in self.outputs))
        return fx.GraphModule(root, graph)

    def _source_of(self, dimension: str) -> tuple[str, int]:
        """An input that has this variable dimension, and its index in the input's shape."""
        for node in self.inputs:
            if dimension in (node.shape or ()):
                assert node.shape is not None
                return node.name, node.shape.index(dimension)
        raise BundleError(f"invalid graph: no input has the dimension {dimension!r}")


def _weight(weights: Mapping[str, Tensor], node: Node) -> Tensor:
    tensor = weights.get(node.target)
    if tensor is None:
        raise BundleError(f"the weights lack {node.target!r}")
    if tensor.dtype != node.dtype or tuple(tensor.shape) != node.shape:
        raise BundleError(
            f"the weight {node.target!r} is {tensor.dtype} {tuple(tensor.shape)}; the graph expects {node.dtype} {node.shape}"
        )
    return tensor


def _fx_arguments(argument: Any, values: Mapping[str, fx.Node], device: torch.device) -> Any:
    if isinstance(argument, Value):
        return values[argument.name]
    if isinstance(argument, Device):
        return device
    if isinstance(argument, tuple):
        return tuple(_fx_arguments(item, values, device) for item in argument)
    return argument
