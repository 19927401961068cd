"""Captures a classifier that consists of common layers: the graph that `trace.capture` makes, in milliseconds instead of seconds.

torch.export takes 2 to 6 seconds for a ResNet, at every start of every leader: leaders on read-only file systems have no cache for its
result. A test compares both graphs.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from multiworld_serving.models.bundle.graph import Graph
from multiworld_serving.models.bundle.nodes import BATCH, Node, Value
from multiworld_serving.models.preprocessing import Normalize

_ROWS = 2
_SIZE = "batch_size"
_WRAPPED = "model_"
"""Part of the names of all layers inside an `ImageModel`. People see the names of what crosses a cut."""
_LEAVES = (
    *(Normalize, nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d, nn.AdaptiveAvgPool2d),
    *(nn.Linear, nn.Softmax),
)
aten = torch.ops.aten


def capture_layers(module: nn.Module, name: str, shape: tuple[int, ...]) -> tuple[Graph, dict[str, Tensor]]:
    """The graph of a module in eval mode, and its weights by key.

    Args:
        module: takes one tensor. Contains only layers of `_LEAVES`, additions, and `torch.flatten(x, 1)`.
        name: for the input.
        shape: of one row of the input, which is uint8.
    """
    return _Capture(module, name, shape).run()


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _LEAVES)


class _Capture:
    """Writes each layer as calls of aten, and computes their shapes on tensors without data."""

    def __init__(self, module: nn.Module, name: str, shape: tuple[int, ...]) -> None:
        self._module = module
        self._input = name
        self._nodes = [Node("input", name, dtype=torch.uint8, shape=(BATCH, *shape)), Node("size", _SIZE, BATCH)]
        self._values: dict[str, Any] = {
            name: torch.empty((_ROWS, *shape), dtype=torch.uint8, device="meta"),
            _SIZE: _ROWS,
        }
        self._weights: dict[str, Tensor] = {}

    def run(self) -> tuple[Graph, dict[str, Tensor]]:
        found: dict[Any, Value] = {}
        with torch.no_grad():
            for node in _Tracer().trace(self._module).nodes:
                name = node.name.removeprefix(_WRAPPED)
                match node.op:
                    case "placeholder":
                        found[node] = Value(self._input)
                    case "call_module":
                        layer = self._module.get_submodule(str(node.target))
                        found[node] = self._layer(name, str(node.target), layer, found[node.args[0]])
                    case "call_function" if node.target in (operator.add, operator.iadd):
                        found[node] = self._call(name, aten.add.Tensor, *(found[each] for each in node.args))
                    case "call_function" if node.target is torch.flatten and node.args[1:] == (1,):
                        images = found[node.args[0]]
                        size = (Value(_SIZE), self._values[images.name][0].numel())
                        found[node] = self._call(name, aten.view.default, images, size)
                    case "output":
                        return Graph(tuple(self._nodes), (found[node.args[0]].name,)), self._weights
                    case _:
                        raise AssertionError(f"{node.target} is not a layer")
        raise AssertionError("the module has no output")

    def _layer(self, name: str, target: str, layer: nn.Module, batch: Value) -> Value:  # noqa: PLR0911 - one for each class
        def weight(attribute: str) -> Value | None:
            return self._weight(f"{target}.{attribute}", getattr(layer, attribute))

        match layer:
            case nn.Conv2d():
                window = [weight("bias"), layer.stride, layer.padding, layer.dilation, layer.groups]
                for default in (1, (1, 1), (0, 0), (1, 1), None):  # from the last argument on
                    if window[-1] != default:
                        break
                    window.pop()
                return self._call(name, aten.conv2d.default, batch, weight("weight"), *window)
            case nn.BatchNorm2d():
                weights = [weight(each) for each in ("weight", "bias", "running_mean", "running_var")]
                return self._batch_norm(name, batch, *weights, layer.momentum, layer.eps)
            case nn.ReLU():
                return self._call(name, aten.relu.default, batch)
            case nn.MaxPool2d():
                pairs = [_pair(each) for each in (layer.kernel_size, layer.stride, layer.padding)]
                return self._call(name, aten.max_pool2d.default, batch, *pairs)
            case nn.AdaptiveAvgPool2d():
                return self._call(name, aten.adaptive_avg_pool2d.default, batch, _pair(layer.output_size))
            case nn.Linear():
                return self._call(name, aten.linear.default, batch, weight("weight"), weight("bias"))
            case nn.Softmax():
                return self._call(name, aten.softmax.int, batch, layer.dim)
            case _:
                assert isinstance(layer, Normalize)
                made = self._call(f"{name}_float", aten._to_copy.default, batch, dtype=torch.float32)
                made = self._call(f"{name}_unit", aten.div.Tensor, made, 255)
                made = self._call(f"{name}_centred", aten.sub.Tensor, made, weight("mean"))
                return self._call(name, aten.div.Tensor, made, weight("std"))

    def _weight(self, key: str, tensor: Tensor | None) -> Value | None:
        if tensor is None:
            return None
        name = key.replace(".", "_")
        if key not in self._weights:
            self._weights[key] = tensor.detach()
            self._values[name] = tensor.to("meta")
            self._nodes.append(Node("weight", name, key, dtype=tensor.dtype, shape=tuple(tensor.shape)))
        return Value(name)

    def _call(self, name: str, operation: Any, *args: Any, **kwargs: Any) -> Value:
        value = operation(*(self._value(each) for each in args), **kwargs)
        self._add(Node("call", name, str(operation), args, kwargs, value.dtype, (BATCH, *value.shape[1:])), value)
        return Value(name)

    def _batch_norm(self, name: str, *args: Any) -> Value:
        operation = aten._native_batch_norm_legit_no_training.default
        several = Node("calls", f"{name}_all", str(operation), args)
        value = operation(*(self._value(each) for each in args))[0]
        self._nodes.append(several)
        shape = (BATCH, *value.shape[1:])
        self._add(Node("item", name, "0", (Value(several.name),), dtype=value.dtype, shape=shape), value)
        return Value(name)

    def _add(self, node: Node, value: Tensor) -> None:
        self._nodes.append(node)
        self._values[node.name] = value

    def _value(self, argument: Any) -> Any:
        if isinstance(argument, tuple):
            return tuple(map(self._value, argument))
        return self._values[argument.name] if isinstance(argument, Value) else argument


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)
