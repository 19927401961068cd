"""Checks a graph before anything of it is computed: the arguments of each operator, and all shapes and dtypes, on tensors without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes  # operators on tensors without data import it; forks share its 40 MB
from torch import Tensor, fx

from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.nodes import BATCH, DTYPES, Call, Calls, TensorNode
from multiworld_serving.models.bundle.rows import MAX_COMPUTED_BYTES
from multiworld_serving.models.bundle.signatures import check_call
from multiworld_serving.models.bundle.values import values_of
from multiworld_serving.models.errors import BundleError

MAX_TENSOR_BYTES = 8 << 30
"""Largest tensor that a graph may compute."""


def check_graph(graph: Graph, lengths: Sequence[Mapping[str, int]]) -> None:
    """Check a graph without computing it and without its weights.

    Args:
        lengths: lengths of the variable dimensions for which the shapes are checked; normally the least and the largest.
    Raises:
        BundleError: an operator has arguments that it does not take, a tensor would have another shape or dtype than its node says or
            more than `MAX_TENSOR_BYTES`.
    """
    for node in graph.nodes:
        if isinstance(node, Call | Calls):
            check_call(node, graph.by_name)
    module = graph.build({node.key: node.empty() for node in graph.weights}, torch.device("meta"))
    for each in lengths:
        _check_shapes(graph, module, each)


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
