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
_MAX_SIZE = 1 << 40
_MAX_BITS = 512
"""Longest integer that arithmetic on sizes may produce, so that repeated squaring ends."""
_MAX_EXPONENT = 8
_UNARY = ("neg",)
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
            more than `MAX_TENSOR_BYTES`, or integers may become very large.
    """
    bits: dict[str, int] = {}
    for node in graph.nodes:
        match node.kind:
            case "size":
                bits[node.name] = _MAX_SIZE.bit_length()
            case "integer":
                bits[node.name] = _check_integer(graph, node, bits)
            case "item":
                if graph.by_name[node.operands[0]].kind != "calls":
                    raise BundleError(f"invalid graph: {node.name!r} is an item of something else than several tensors")
            case "call" | "calls":
                _check_call(graph, node)
    weights = {node.target: torch.empty(_fixed(node), dtype=node.dtype, device="meta") for node in graph.weights}
    module = graph.build(weights, torch.device("meta"))
    for each in lengths:
        _check_shapes(graph, module, each)


def _check_integer(graph: Graph, node: Node, bits: Mapping[str, int]) -> int:
    """Returns the most bits that the result can have."""
    if node.target == "length":
        match node.args:
            case (Value(name), int()) if graph.by_name[name].is_tensor:
                return _MAX_SIZE.bit_length()
        raise BundleError(f"invalid graph: {node.name!r} is not the length of a dimension of a tensor")
    expected = 1 if node.target in _UNARY else 2
    valid = [isinstance(arg, int) or (isinstance(arg, Value) and arg.name in bits) for arg in node.args]
    if len(valid) != expected or not all(valid):
        raise BundleError(f"invalid graph: the arguments of {node.name!r} are not {expected} integers")
    sizes = [bits[arg.name] if isinstance(arg, Value) else int(arg).bit_length() for arg in node.args]
    most = max(sizes) + 1
    if node.target == "mul":
        most = sum(sizes)
    elif node.target == "pow":
        exponent = node.args[1]
        if not isinstance(exponent, int) or not 0 <= exponent <= _MAX_EXPONENT:
            raise BundleError(f"invalid graph: the exponent of {node.name!r} is not a number from 0 to {_MAX_EXPONENT}")
        most = sizes[0] * exponent + 1
    if most > _MAX_BITS:
        raise BundleError(
            f"invalid graph: the integer {node.name!r} may have {most} bits; at most {_MAX_BITS} are allowed"
        )
    return most


def _check_call(graph: Graph, node: Node) -> None:
    schema = find_operator(node.target)._schema
    names = [argument.name for argument in schema.arguments]
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    given = [*positional[: len(node.args)], *node.kwargs]
    if len(node.args) > len(positional) or len(set(given)) < len(given) or not set(given) <= set(names):
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
