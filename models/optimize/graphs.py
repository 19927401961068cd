"""Helpers for rewriting the graph of a stage."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from multiworld_serving.models.bundle.stage import BundleStage

aten = torch.ops.aten


def graph_of(stage: BundleStage) -> fx.GraphModule:
    """A module that takes the input tensors and returns a tuple of outputs. Its graph may be changed; it shares the stage's weights."""
    return fx.GraphModule(stage.module, copy.deepcopy(stage.module.graph))


def constant(module: fx.GraphModule, node: Any) -> Tensor | None:
    """The weight that a node stands for; None if it is not a weight."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    assert isinstance(value, Tensor)
    return value.detach()


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
    _Shapes(module).run(*(each.to("meta") for each in inputs))


class _Shapes(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        n.meta["val"] = value = super().run_node(n)
        return value

    def fetch_attr(self, target: str) -> Any:
        return super().fetch_attr(target).to("meta")

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(target, args, on_device(kwargs, torch.device("meta")))


def on_device(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Arguments of an operator that creates its result on this device."""
    return kwargs | {"device": device} if kwargs.get("device") is not None else kwargs


def place(module: fx.GraphModule, device: torch.device) -> None:
    """Move a graph with its weights to this device, in place."""
    for node in module.graph.nodes:
        node.kwargs = on_device(node.kwargs, device)
    module.recompile()
    module.to(device)
