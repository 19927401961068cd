"""Helpers for rewriting the graph of a stage."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from multiworld_serving.models.bundle.checking import values_of
from multiworld_serving.models.bundle.signatures import expect_shapes

aten = torch.ops.aten
CONV = aten.conv2d.default


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """The module with a graph that may be changed. It shares the weights."""
    return fx.GraphModule(module, copy.deepcopy(module.graph))


def constant(module: fx.GraphModule, node: Any) -> Tensor | None:
    """The weight that a node stands for; None if it is not a weight."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    return module.get_buffer(str(node.target)).detach()


def add_constant(module: fx.GraphModule, before: fx.Node, tensor: Tensor) -> fx.Node:
    """A node for a new weight."""
    name = f"rewritten_{sum(1 for _ in module.buffers())}"
    module.register_buffer(name, tensor)
    with module.graph.inserting_before(before):
        node = module.graph.get_attr(name)
    node.meta["val"] = tensor.to("meta")
    return node


def only_user(node: fx.Node) -> fx.Node | None:
    """The node that uses this one, if there is a single one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def value_of(node: Any) -> Tensor | None:
    """A tensor without data, of this node's shape and dtype; None if it is not a tensor. See `propagate`."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def propagate(module: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
    """Store what each node computes from such inputs, without data."""
    empty = copy_of(module)
    place(empty, torch.device("meta"))
    values = values_of(empty, [each.to("meta") for each in inputs])
    computed = (node for node in module.graph.nodes if node.target is not expect_shapes)
    for node, value in zip(computed, values, strict=False):  # the last node is the output
        node.meta["val"] = value


def place(module: fx.GraphModule, device: torch.device) -> None:
    """Move a graph with its weights to this device, in place."""
    for node in module.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.update_kwarg("device", device)
    module.recompile()
    module.to(device)
