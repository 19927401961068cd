"""Checks a graph before anything of it is computed: the arguments of each operator, and all shapes and dtypes, on tensors without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes  # operators on tensors without data import it; forks share its 40 MB
from torch import Tensor, fx

from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.nodes import BATCH, DTYPES, Call, Calls, Shape, TensorNode, names_in
from multiworld_serving.models.bundle.rows import MAX_COMPUTED_BYTES
from multiworld_serving.models.bundle.values import values_of
from multiworld_serving.models.errors import BundleError

MAX_TENSOR_BYTES = 8 << 30
"""Largest tensor that a graph may compute."""
_BATCH_NORM = ("aten._native_batch_norm_legit_no_training.default", "aten._native_batch_norm_legit.no_stats")
"""Operators that do not check that their weights have one element per channel, and would read beyond the end."""


def check_graph(graph: Graph, lengths: Sequence[Mapping[str, int]]) -> None:
    """Check a graph without computing it and without its weights.

    Args:
        lengths: lengths of the variable dimensions for which the shapes are checked; normally the least and the largest.
    Raises:
        BundleError: an operator has arguments that it does not take, a tensor would have another shape or dtype than its node says or
            more than `MAX_TENSOR_BYTES`.
    """
    for node in graph.nodes:
        if isinstance(node, Call | Calls) and node.target in _BATCH_NORM:
            _check_channels(graph, node)
    module = graph.build({node.key: node.empty() for node in graph.weights}, torch.device("meta"))
    for each in lengths:
        _check_shapes(graph, module, each)


def _check_channels(graph: Graph, node: Call | Calls) -> None:
    shapes: list[Shape] = [getattr(graph.by_name[name], "shape", ()) for name in names_in(node.args)]
    channels = shapes[0][1:2] if shapes else ()
    fixed = channels != () and isinstance(channels[0], int)
    if node.kwargs or not fixed or any(shape != channels for shape in shapes[1:]):
        raise BundleError(f"invalid graph: {node.name!r} does not have one weight per channel")


def _check_shapes(graph: Graph, module: fx.GraphModule, lengths: Mapping[str, int]) -> None:
    found: dict[str, Any] = {}
    values = values_of(module, [node.empty(lengths) for node in graph.inputs])
    for node in graph.nodes:
        try:
            found[node.name] = next(values)
        except Exception as error:  # operators raise many types
            lines = str(error).splitlines() or [""]
            raise BundleError(f"invalid graph: {node.name!r} cannot be computed ({lines[0][:200]})") from error
        if isinstance(node, TensorNode):
            _compare(node, found[node.name], lengths)
    for name in graph.outputs:
        size = found[name].nbytes
        if None in graph.tensor(name).shape and size > MAX_COMPUTED_BYTES * lengths[BATCH]:
            raise BundleError(
                f"a row of the output {name!r} has {size // lengths[BATCH]} bytes; at most "
                f"{MAX_COMPUTED_BYTES} are possible with a computed dimension"
            )


def _compare(node: TensorNode, value: Any, lengths: Mapping[str, int]) -> None:
    expected = [lengths.get(dim, -1) if isinstance(dim, str) else dim for dim in node.shape]
    found = list(value.shape) if isinstance(value, Tensor) else None
    same = (
        found is not None
        and len(found) == len(expected)
        and all(dim in (None, length) for dim, length in zip(expected, found, strict=True))
    )
    if not same or value.dtype != DTYPES[node.dtype]:
        what = f"{value.dtype} {found}" if found is not None else type(value).__name__
        raise BundleError(f"invalid graph: {node.name!r} is {what}; expected {node.dtype} {list(node.shape)}")
    if value.nbytes > MAX_TENSOR_BYTES:
        raise BundleError(f"invalid graph: {node.name!r} has more than {MAX_TENSOR_BYTES >> 30} GiB")
