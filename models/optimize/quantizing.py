"""Computes convolutions and linear layers in int8, with oneDNN's operators.

Activations are uint8 with one scale and zero point per tensor, from the ranges that calibration found (`Graph.ranges`). Weights are int8
with one scale per output channel. A layer whose input has a range is computed in int8; its output is uint8 where only such layers take
it, and float32 elsewhere. Inductor generates the same operators for a quantized model; called directly they need no compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from multiworld_serving.models.optimize.fusing import (
    Layer,
    PackedWeight,
    Workload,
    dequantize,
    fuse,
    fused_layer,
    quantize,
)
from multiworld_serving.models.optimize.tracing import aten, only_user, range_of

_NEEDED = ("qconv_prepack", "qconv2d_pointwise", "qlinear_prepack", "qlinear_pointwise")
_PASSING = (aten.max_pool2d.default, aten.contiguous.default, aten.flatten.using_ints, aten.reshape.default)
"""Operators that return values of their input only."""
_POOL_ARGUMENTS = 4
"""Of a max pooling without dilation and rounding up: input, kernel, stride, padding."""
_CONV_ACTIVATIONS, _LINEAR_ACTIVATIONS = ("none", "relu", "hardswish", "swish"), ("none", "relu", "gelu")
_LEVELS, _WEIGHT_LEVELS = 255, 127
_LEAST_SCALE = 1e-12
_NO_CONVERSION = (1.0, 0)


def quantizable() -> bool:
    """Whether this torch has the operators."""
    return torch._C._has_mkldnn and all(hasattr(torch.ops.onednn, name) for name in _NEEDED)


class Scale(NamedTuple):
    """How uint8 stands for a number: `scale` * (value - `zero`)."""

    scale: float
    zero: int

    @classmethod
    def of(cls, bounds: tuple[float, float]) -> Scale:
        """For numbers from the first to the second, around 0."""
        least, most = bounds
        scale = max((most - least) / _LEVELS, _LEAST_SCALE)
        return cls(scale, round(-least / scale))


class _QuantizedLayer(nn.Module):
    """A layer that takes uint8 and returns float32, or uint8 after `return_uint8`.

    Attributes:
        output: scale, zero point and dtype of the output.
        other: scale and zero point of the tensor to add.
    """

    def __init__(self, layer: Layer, given: Scale) -> None:
        super().__init__()
        self._bias, self._activation, self._given = layer.bias, layer.activation, given
        self._scales = (layer.weight.abs().flatten(1).amax(1) / _WEIGHT_LEVELS).clamp_min(_LEAST_SCALE)
        self._zeros = torch.zeros(len(self._scales), dtype=torch.int64)
        self.output: tuple[Any, ...] = (*_NO_CONVERSION, torch.float32)
        self.other: tuple[Any, ...] = _NO_CONVERSION

    def _rounded(self, weight: Tensor) -> Tensor:
        """The weights as int8."""
        scales = self._scales.view(-1, *[1] * (weight.dim() - 1))
        return (weight / scales).round().to(torch.int8).contiguous()


class QuantizedConv(_QuantizedLayer):
    """A convolution with bias, optional addition, and activation, in channels-last layout."""

    def __init__(self, layer: Layer, given: Scale) -> None:
        super().__init__(layer, given)
        padding, stride, dilation, groups = layer.window
        self._window = (stride, padding, dilation, groups)
        self._one = layer.given.shape[0] // layer.rows
        weight = self._rounded(layer.weight)

        def reorder(is_batch: bool) -> Tensor:
            shape = (self._one * (layer.workload.max_batch_size if is_batch else 1), *layer.given.shape[1:])
            packed: Tensor = torch.ops.onednn.qconv_prepack(weight, self._scales, *given, *self._window, shape)
            return packed

        self.weight = PackedWeight(reorder, layer.workload)
        self.in_place = False

    def forward(self, batch: Tensor, other: Tensor | None = None) -> Tensor:
        """The activation of the convolution plus `other`, which is overwritten if `in_place`."""
        batch = batch.contiguous(memory_format=torch.channels_last)
        weight = self.weight.wanted_for(len(batch) > self._one)
        layer = (batch, *self._given, weight, self._scales, self._zeros)
        conv = torch.ops.onednn.qconv2d_pointwise
        output: Tensor
        if other is None:
            output = conv(*layer, self._bias, *self._window, *self.output, *self._activation)
            return output
        total = other.contiguous(memory_format=torch.channels_last)
        if total is other and not self.in_place:
            total = other.clone()
        settings = (*self._window, *self.output, *self.other, "sum", 1.0, *self._activation)
        output = conv.binary(*layer, total, self._bias, *settings)
        return output


class QuantizedLinear(_QuantizedLayer):
    """A linear layer with bias, and an activation or an addition of float32."""

    def __init__(self, layer: Layer, given: Scale) -> None:
        super().__init__(layer, given)
        self._one, self._features = layer.vectors, layer.weight.shape[1]
        weight = self._rounded(layer.weight)

        def reorder(is_batch: bool) -> Tensor:
            vectors = self._one * (layer.workload.max_batch_size if is_batch else 1)
            packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, (vectors, self._features))
            return packed

        self.weight = PackedWeight(reorder, layer.workload)

    def forward(self, batch: Tensor, other: Tensor | None = None) -> Tensor:
        """The activation of the linear layer, or its sum with `other`."""
        weight = self.weight.wanted_for(batch.numel() > self._one * self._features)
        layer = (batch.contiguous(), *self._given, weight, self._scales, self._zeros)
        output: Tensor = torch.ops.onednn.qlinear_pointwise(*layer, self._bias, *self.output, *self._activation)
        return output if other is None else output.add_(other)


def quantize_layers(module: fx.GraphModule, workload: Workload, rows: int) -> None:
    """Replace convolutions and linear layers as `fuse` does, by int8 ones where the range of the input is known."""
    _share_ranges(module.graph)
    fuse(module, workload, rows, _layer)
    for node in list(module.graph.nodes):
        if _quantized_layer(module, node) is not None:
            node.update_arg(0, _uint8(node.args[0]))
    for node in reversed(list(module.graph.nodes)):  # so that the users of a value come first
        layer = _quantized_layer(module, node)
        if node.target in _PASSING:
            _quantize_early(node)
        elif layer is not None and any(user.target is quantize for user in node.users):
            _return_uint8(layer, node)


def _layer(layer: Layer) -> nn.Module:
    bounds = range_of(layer.node.args[0])
    known = _CONV_ACTIVATIONS if layer.is_conv else _LINEAR_ACTIVATIONS
    if bounds is None or layer.weight.dtype != torch.float32 or layer.activation[0] not in known:
        return fused_layer(layer)
    made = QuantizedConv if layer.is_conv else QuantizedLinear
    return made(layer, Scale.of(bounds))


def _quantized_layer(module: fx.GraphModule, node: fx.Node) -> _QuantizedLayer | None:
    layer = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    return layer if isinstance(layer, _QuantizedLayer) else None


def _share_ranges(graph: fx.Graph) -> None:
    """Give operators that pass values on the range of their input, and that input theirs if it has none."""
    passing = [node for node in graph.nodes if node.target in _PASSING]
    for node in reversed(passing):
        if range_of(node.args[0]) is None:
            node.args[0].meta["range"] = range_of(node)
    for node in passing:
        node.meta["range"] = range_of(node.args[0])


def _uint8(node: Any) -> fx.Node:
    """A node for the values of a node with a range as uint8."""
    bounds = range_of(node)
    assert bounds is not None
    for user in node.users:
        if user.target is quantize:
            found: fx.Node = user
            return found
    with node.graph.inserting_after(node):
        made: fx.Node = node.graph.call_function(quantize, (node, *Scale.of(bounds)))
    return made


def _quantize_early(node: fx.Node) -> None:
    """Convert before an operator that passes values on, if all that follows takes uint8."""
    after = only_user(node)
    is_pool = node.target is aten.max_pool2d.default
    if after is not None and after.target is quantize and not (is_pool and len(node.args) > _POOL_ARGUMENTS):
        node.update_arg(0, _uint8(node.args[0]))
        after.replace_all_uses_with(node)
        node.graph.erase_node(after)
        if is_pool:
            node.target = _max_pool


def _max_pool(
    values: Tensor, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0, 0)
) -> Tensor:
    """`max_pool2d` of uint8, which torch offers for small images only. Three times as fast as that of float32."""
    found = functional.pad(values, (padding[1], padding[1], padding[0], padding[0]))  # 0 is the smallest value
    for dim, size, step in zip((2, 3), kernel, stride or kernel, strict=True):
        span = (found.shape[dim] - size) // step * step + 1
        parts = (found.narrow(dim, start, span) for start in range(size))
        found = reduce(torch.maximum, (part[:, :, ::step] if dim == 2 else part[..., ::step] for part in parts))
    return found


def _return_uint8(layer: _QuantizedLayer, node: fx.Node) -> None:
    """Make a layer return uint8, and convert it for those that need float32."""
    bounds, other = range_of(node), node.args[1] if len(node.args) > 1 else None
    if bounds is None or (other is not None and (range_of(other) is None or isinstance(layer, QuantizedLinear))):
        return
    scale = Scale.of(bounds)
    layer.output = (*scale, torch.uint8)
    if other is not None:
        layer.other = Scale.of(range_of(other) or bounds)
        node.update_arg(1, _uint8(other))
    users = list(node.users)
    for user in users:
        if user.target is quantize:
            user.replace_all_uses_with(node)
            node.graph.erase_node(user)
    left = [user for user in users if user.target is not quantize]
    if left:
        with node.graph.inserting_after(node):
            floats = node.graph.call_function(dequantize, (node, *scale))
        for user in left:
            user.replace_input_with(node, floats)
