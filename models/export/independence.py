"""Proves that each row of a batch is computed independently of the others: changes one row, and compares the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.nodes import BATCH, Node
from multiworld_serving.models.errors import ExportError

_TOLERANCE = 1e-5
"""Largest difference of an unchanged row, relative to the largest absolute value."""
_FACTOR = 1e3

_CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda rows: rows * _FACTOR if rows.is_floating_point() else torch.full_like(rows, rows.max().item()),
    lambda rows: rows / _FACTOR if rows.is_floating_point() else torch.full_like(rows, rows.min().item()),
    lambda rows: rows.flip(0).neg() if rows.is_floating_point() else rows.flip(0),
)
"""One random change could miss `x / x.abs().max()`. Integers stay among those of the example, which are valid."""


def check_independent_rows(
    graph: Graph, weights: Mapping[str, Tensor], compute: Callable[..., Sequence[Tensor]], example: Sequence[Tensor]
) -> None:
    """Change the first row of the example in several ways, and the last one in one way.

    Args:
        compute: the outputs of the graph for inputs.
    Raises:
        ExportError: another row changes, too. Names the operator.
    """
    expected, count = compute(*example), len(example[0])
    for row, changes in ((0, _CHANGES), (count - 1, _CHANGES[-1:])):
        kept = [index for index in range(count) if index != row]
        for change in changes:
            changed = [tensor.clone() for tensor in example]
            for tensor in changed:
                tensor[row] = change(tensor)[row]
            found = compute(*changed)
            if not all(_same(one[kept], two[kept]) for one, two in zip(found, expected, strict=True)):
                name = _mixing_operator(graph, weights, example, changed, kept)
                raise ExportError(
                    f"the model mixes the rows of a batch: {name} computes other values for rows that have not changed when one row of "
                    f"{count} changes; dimension 0 of every input and output is the batch (batch_first), and each row is computed alone"
                )


def _same(found: Tensor, expected: Tensor) -> bool:
    if not expected.is_floating_point() or not expected.numel():
        return found.equal(expected)
    limit = _TOLERANCE * expected.abs().nan_to_num(0, 0, 0).max()
    return bool(torch.allclose(found, expected, rtol=0, atol=float(limit), equal_nan=True))


def _mixing_operator(
    graph: Graph, weights: Mapping[str, Tensor], one: Sequence[Tensor], other: Sequence[Tensor], kept: Sequence[int]
) -> str:
    """The first operator that computes something else for the unchanged rows, or for all rows together."""
    module = graph.build(weights, torch.device("cpu"))
    values, changed = _Values(module), _Values(module)
    with torch.no_grad():
        values.run(*one)
        changed.run(*other)
    for node, found, expected in zip(graph.nodes, changed.found, values.found, strict=True):
        if node.is_tensor and not _same(*(_unchanged(node, each, kept) for each in (found, expected))):
            return _operator_of(graph, node)
    return _operator_of(graph, graph.by_name[graph.outputs[0]])


def _unchanged(node: Node, value: Tensor, kept: Sequence[int]) -> Tensor:
    """The part of a tensor that has nothing of the changed row: all of it if no dimension can contain the batch."""
    shape = node.shape or ()
    if BATCH in shape:
        return value.index_select(shape.index(BATCH), torch.tensor(kept))
    return value.new_empty(0) if None in shape else value


def _operator_of(graph: Graph, node: Node) -> str:
    return graph.by_name[node.operands[0]].target if node.kind == "item" else node.target


class _Values(fx.Interpreter):
    """Keeps what each node computes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: list[Any] = []

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            self.found.append(value)
        return value
