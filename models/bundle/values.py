"""The value of each node of a graph, with or without data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx

from multiworld_serving.models.bundle.signatures import expect_shapes


def values_of(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Iterator[Any]:
    """Compute the nodes of a graph in order: on tensors without data, if those of the module and the inputs have none.

    Computes `expect_shapes`, too, but yields nothing for it.

    Raises whatever operators raise.
    """
    interpreter = fx.Interpreter(module)
    interpreter.args_iter = iter(inputs)
    for node in module.graph.nodes:
        if node.op != "output":
            with torch.no_grad():
                interpreter.env[node] = interpreter.run_node(node)
            if node.target is not expect_shapes:
                yield interpreter.env[node]


def _exclude_from_compiling(function: Any) -> None:
    """Set the attribute by which torch excludes a function and the functions that it wraps from its compiler.

    Without it, torch sets the attribute at the first call on a meta tensor. It imports the compiler for that: two seconds of CPU time.
    """
    for cell in getattr(function, "__closure__", None) or ():
        inner = cell.cell_contents
        if isinstance(inner, FunctionType) and not hasattr(inner, "__dynamo_disable"):
            setattr(inner, "__dynamo_disable", inner)
            _exclude_from_compiling(inner)


for _module in (torch._refs, torch._refs.nn.functional, torch._refs.linalg, torch._decomp.decompositions):
    for _function in vars(_module).values():
        _exclude_from_compiling(_function)
