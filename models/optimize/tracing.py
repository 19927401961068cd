"""The graph of a stage as calls of aten operators, and helpers for rewriting it.

A stage of a bundle has a graph. A ResNet stage is traced symbolically, which takes milliseconds and computes nothing.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from multiworld_serving.models.bundle.stage import BundleStage
from multiworld_serving.models.preprocessing import Normalize
from multiworld_serving.models.stage_kinds import AnyStage

aten = torch.ops.aten
_LEAVES = (
    *(Normalize, nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d, nn.AdaptiveAvgPool2d),
    *(nn.Flatten, nn.Linear, nn.Softmax),
)


def graph_of(stage: AnyStage) -> fx.GraphModule:
    """A module that takes the input tensors and returns a tuple of outputs. Its graph may be changed; it shares the stage's weights."""
    if isinstance(stage, BundleStage):
        assert isinstance(stage.module, fx.GraphModule)
        return fx.GraphModule(stage.module, copy.deepcopy(stage.module.graph))
    graph = _Tracer().trace(stage)
    for node in list(graph.nodes):
        if node.op == "call_module":
            with graph.inserting_before(node):
                node.replace_all_uses_with(_as_aten(graph, node, stage.get_submodule(str(node.target))))
            graph.erase_node(node)
        elif node.op == "call_function":
            assert node.target in (operator.add, operator.iadd)
            node.target = aten.add.Tensor
        elif node.op == "output":
            node.args = (tuple(node.args),)
    return fx.GraphModule(stage, graph)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _LEAVES)


def _as_aten(graph: fx.Graph, node: fx.Node, module: nn.Module) -> fx.Node:  # noqa: PLR0911 - one for each class
    """Calls of aten that compute what this call of a module does, with its weights as attributes."""
    batch = node.args[0]

    def weight(name: str) -> fx.Node | None:
        return None if getattr(module, name) is None else graph.get_attr(f"{node.target}.{name}")

    def call(target: Any, *args: Any) -> fx.Node:
        return graph.call_function(target, args)

    match module:
        case nn.Conv2d():
            window = (module.stride, module.padding, module.dilation, module.groups)
            return call(aten.conv2d.default, batch, weight("weight"), weight("bias"), *window)
        case nn.BatchNorm2d():
            weights = map(weight, ("weight", "bias", "running_mean", "running_var"))
            norm = call(aten._native_batch_norm_legit_no_training.default, batch, *weights, module.momentum, module.eps)
            return call(operator.getitem, norm, 0)
        case nn.ReLU():
            return call(aten.relu.default, batch)
        case nn.MaxPool2d():
            settings = (module.kernel_size, module.stride, module.padding, module.dilation)
            pairs = [[each, each] if isinstance(each, int) else each for each in settings]
            return call(aten.max_pool2d.default, batch, *pairs, module.ceil_mode)
        case nn.AdaptiveAvgPool2d():
            size = module.output_size
            return call(aten.adaptive_avg_pool2d.default, batch, (size, size) if isinstance(size, int) else size)
        case nn.Flatten():
            return call(aten.flatten.using_ints, batch, module.start_dim, module.end_dim)
        case nn.Linear():
            return call(aten.linear.default, batch, weight("weight"), weight("bias"))
        case nn.Softmax():
            return call(aten.softmax.int, batch, module.dim)
        case _:
            assert isinstance(module, Normalize)
            scaled = call(aten.div.Tensor, call(aten.to.dtype, batch, torch.float32), 255)
            return call(aten.div.Tensor, call(aten.sub.Tensor, scaled, weight("mean")), weight("std"))


# -- rewriting ----------------------------------------------------------------------------------------------------------------


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


def range_of(node: Any) -> tuple[float, float] | None:
    """Least and most value of a node in calibration; None if it is not known."""
    found: tuple[float, float] | None = node.meta.get("range") if isinstance(node, fx.Node) else None
    return found


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
