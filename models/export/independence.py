"""Proves that each row of a batch is computed independently of the others: changes one row, and compares the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from multiworld_serving.models.bundle.checking import values_of
from multiworld_serving.models.bundle.files import Bundle, read_bundle
from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.nodes import BATCH, Call, Calls, Item, Node, TensorNode
from multiworld_serving.models.errors import ExportError

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-5
"""Largest difference of an unchanged row, relative to the largest absolute value."""
_FACTOR = 1e3

_CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda rows: rows * _FACTOR if rows.is_floating_point() else torch.full_like(rows, rows.max().item()),
    lambda rows: rows / _FACTOR if rows.is_floating_point() else torch.full_like(rows, rows.min().item()),
    lambda rows: rows.flip(0).neg() if rows.is_floating_point() else rows.flip(0),
)
"""One random change could miss `x / x.abs().max()`. Integers stay among those of the example, which are valid."""


def prove_independent_rows(bundle: Bundle) -> None:
    """Check a bundle that was exported without the proof, with its self-test as the example. Blocks: computes ten rows.

    Raises:
        ExportError: a row changes another one. Names the operator.
    """
    if bundle.manifest.max_batch_size == 1:
        return
    example = [torch.cat([bundle.self_test[f"input.{node.name}"]] * 2) for node in bundle.graph.inputs]
    weights = bundle.weights(node.key for node in bundle.graph.weights)
    with torch.no_grad():
        check_independent_rows(bundle.graph, weights, bundle.build(bundle.graph), example)


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
    for node, found, expected in zip(graph.nodes, values_of(module, other), values_of(module, one), strict=True):
        if isinstance(node, TensorNode) and not _same(*(_unchanged(node, each, kept) for each in (found, expected))):
            return _operator_of(graph, node)
    return _operator_of(graph, graph.tensor(graph.outputs[0]))


def _unchanged(node: TensorNode, value: Tensor, kept: Sequence[int]) -> Tensor:
    """The part of a tensor that has nothing of the changed row: all of it if no dimension can contain the batch."""
    if BATCH in node.shape:
        return value.index_select(node.shape.index(BATCH), torch.tensor(kept))
    return value.new_empty(0) if None in node.shape else value


def _operator_of(graph: Graph, node: Node) -> str:
    if isinstance(node, Item):
        node = graph.by_name[node.value]
    return node.target if isinstance(node, Call | Calls) else node.name


def read_proven(path: Path) -> Bundle:
    """Read a bundle whose rows do not depend on each other. Raises BundleError, ExportError."""
    bundle = read_bundle(path)
    if not bundle.manifest.independent_rows:
        logger.info("%s was exported without a proof of independent rows; checking it at each start", path)
        prove_independent_rows(bundle)
    return bundle
