"""Checks a graph before anything of it is computed: the arguments of each operator, and all shapes and dtypes, on tensors without data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.nodes import BATCH, Node, Value
from multiworld_serving.models.bundle.operators import find_operator
from multiworld_serving.models.bundle.rows import MAX_COMPUTED_BYTES
from multiworld_serving.models.errors import BundleError

MAX_TENSOR_BYTES = 8 << 30
"""Largest tensor that a graph may compute."""
_BATCH_NORM = {
    "aten._native_batch_norm_legit_no_training.default": range(1, 5),
    "aten._native_batch_norm_legit.no_stats": range(1, 3),
}
"""Positions of arguments that must have one element per channel. These operators do not check it and would read beyond the end."""


def check_graph(graph: Graph, lengths: Sequence[Mapping[str, int]]) -> None:
    """Check a graph without computing it and without its weights.

    Args:
        lengths: lengths of the variable dimensions for which the shapes are checked; normally the least and the largest.
    Raises:
        BundleError: an operator has arguments that it does not take, a tensor would have another shape or dtype than its node says or
            more than `MAX_TENSOR_BYTES`.
    """
    for node in graph.nodes:
        if node.kind in ("call", "calls"):
            _check_call(graph, node)
        if node.kind == "item" and graph.by_name[node.operands[0]].kind != "calls":
            raise BundleError(f"invalid graph: {node.name!r} is an item of something else than several tensors")
    weights = {node.target: torch.empty(_fixed(node), dtype=node.dtype, device="meta") for node in graph.weights}
    module = graph.build(weights, torch.device("meta"))
    for each in lengths:
        _check_shapes(graph, module, each)


def _check_call(graph: Graph, node: Node) -> None:
    names = {argument.name for argument in find_operator(node.target)._schema.arguments}
    if not names.issuperset(node.kwargs):  # torch itself checks the rest when the shapes are computed
        raise BundleError(f"invalid graph: the arguments of {node.name!r} are not those of {node.target}")
    channels = _BATCH_NORM.get(node.target)
    if channels is None:
        return
    shapes = [graph.by_name[arg.name].shape if isinstance(arg, Value) else None for arg in node.args]
    images = shapes[0] if shapes else None
    count = images[1] if images is not None and len(images) > 1 else None
    wrong = [
        position
        for position in channels
        if position >= len(node.args) or (node.args[position] is not None and shapes[position] != (count,))
    ]
    if wrong or not isinstance(count, int) or node.kwargs:
        raise BundleError(f"invalid graph: {node.name!r} does not have one weight per channel")


def _fixed(node: Node) -> tuple[int, ...]:
    assert node.shape is not None
    if not all(isinstance(dim, int) for dim in node.shape):
        raise BundleError(f"invalid graph: the weight {node.target!r} has a variable dimension")
    return tuple(dim for dim in node.shape if isinstance(dim, int))


def _check_shapes(graph: Graph, module: fx.GraphModule, lengths: Mapping[str, int]) -> None:
    inputs = []
    for node in graph.inputs:
        assert node.shape is not None
        if unknown := [dim for dim in node.shape if not isinstance(dim, int) and dim not in lengths]:
            raise BundleError(f"invalid graph: the input {node.name!r} has the unknown dimension {unknown[0]!r}")
        shape = [dim if isinstance(dim, int) else lengths[str(dim)] for dim in node.shape]
        inputs.append(torch.empty(shape, dtype=node.dtype, device="meta"))
    nodes = iter(graph.nodes)
    checker = _Checker(module, nodes, lengths)
    with torch.no_grad():
        outputs = checker.run(*inputs)
    for name, output in zip(graph.outputs, outputs, strict=True):
        size = output.numel() * output.element_size()
        if None in (graph.by_name[name].shape or ()) and size > MAX_COMPUTED_BYTES * lengths[BATCH]:
            raise BundleError(
                f"a row of the output {name!r} has {size // lengths[BATCH]} bytes; at most "
                f"{MAX_COMPUTED_BYTES} are possible with a computed dimension"
            )


class _Checker(fx.Interpreter):
    """Runs the graph on tensors without data, and compares each tensor with its node."""

    def __init__(self, module: fx.GraphModule, nodes: Iterator[Node], lengths: Mapping[str, int]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.extra_traceback = False
        self._nodes = nodes
        self._lengths = lengths

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        node = next(self._nodes)
        try:
            value = super().run_node(n)
        except Exception as error:  # operators raise many types
            lines = str(error).splitlines() or [""]
            raise BundleError(f"invalid graph: {node.name!r} cannot be computed ({lines[0][:200]})") from error
        if node.is_tensor:
            self._compare(node, value)
        return value

    def _compare(self, node: Node, value: Any) -> None:
        assert node.shape is not None
        found = tuple(value.shape) if isinstance(value, Tensor) else None
        expected = tuple(self._lengths.get(dim, -1) if isinstance(dim, str) else dim for dim in node.shape)
        same = (
            found is not None
            and len(found) == len(expected)
            and all(dim is None or dim == length for dim, length in zip(expected, found, strict=True))
        )
        if not same or value.dtype != node.dtype:
            what = f"{value.dtype} {list(found)}" if found is not None else type(value).__name__
            raise BundleError(f"invalid graph: {node.name!r} is {what}; expected {node.dtype} {list(node.shape)}")
        if value.numel() * value.element_size() > MAX_TENSOR_BYTES:
            raise BundleError(f"invalid graph: {node.name!r} has more than {MAX_TENSOR_BYTES >> 30} GiB")
