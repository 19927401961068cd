"""Fuses convolutions on a CPU with what follows them, and chooses how each is computed.

Without oneDNN's operations stages run unfused. Linear layers are not fused, because torch's own are faster in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from multiworld_serving.models.optimize.convolutions import Convolution, FusedConv, SmallConv, Workload, matrix_of
from multiworld_serving.models.optimize.graphs import CONV, aten, constant, only_user, value_of
from multiworld_serving.models.optimize.winograd import WinogradConv, suits_winograd

_NEEDED = (
    *("_convolution_pointwise", "_convolution_pointwise_", "_reorder_convolution_weight", "data_ptr", "_nbytes"),
    *("_linear_pointwise", "_reorder_linear_weight"),
)
_DEFAULT_WINDOW: tuple[Any, ...] = ([1, 1], [0, 0], [1, 1], 1)
"""Stride, padding, dilation and groups."""
_ACTIVATIONS: dict[Any, str] = {
    aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
    aten.hardswish.default: "hardswish",
    aten.hardsigmoid.default: "hardsigmoid",
    aten.silu.default: "swish",
}
"""Names in oneDNN."""


def fusable(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether convolutions can be fused: on a CPU with oneDNN, in a precision that oneDNN supports there."""
    operations = torch.ops.mkldnn
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if not all(hasattr(operations, name) for name in _NEEDED):
        return False
    if dtype == torch.float32:
        return True
    supported = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return hasattr(operations, supported) and bool(getattr(operations, supported)())


def fuse(module: fx.GraphModule, workload: Workload, rows: int, *, fixed: bool) -> None:
    """Replace convolutions with fixed weights, and what follows them, by modules.

    Args:
        module: folded, channels-last, with values of `rows` samples (see `propagate`).
        fixed: whether images always have the sizes of these values.
    """
    for node in list(module.graph.nodes):
        if node.target == CONV and (weight := constant(module, node.args[1])) is not None:
            _fuse_layer(module, node, weight, workload, rows, fixed=fixed)


def _fuse_layer(
    module: fx.GraphModule, layer: fx.Node, weight: Tensor, workload: Workload, rows: int, *, fixed: bool
) -> None:
    bias_node = layer.args[2] if len(layer.args) > 2 else None
    bias, given = constant(module, bias_node), value_of(layer.args[0])
    if layer.kwargs or (bias_node is not None and bias is None) or given is None or given.dim() != 4:
        return
    found: tuple[Any, ...] = layer.args[3:]
    stride, padding, dilation, groups = found + _DEFAULT_WINDOW[len(found) :]
    other, activation, chain = None, None, [layer]
    following = only_user(layer)
    # With groups, torch adds after the convolution, and cannot do so in bfloat16 or float16.
    if following is not None and groups == 1 and (other := _added(layer, following)) is not None:
        chain.append(following)
        following = only_user(following)
    if following is not None and not following.kwargs and len(following.args) == 1:
        activation = _ACTIVATIONS.get(following.target)
        if activation is not None and (other is None or activation == "relu"):
            chain.append(following)
        else:
            activation = None
    padding, stride, dilation = ([*each, *each][:2] for each in (padding, stride, dilation))
    shapes = given.shape, layer.meta["val"].shape
    images, in_place = len(given) // rows, other is not None and _is_last_use(other, layer)
    window = (padding, stride, dilation, groups)
    convolution = Convolution(weight, bias, *window, activation, *shapes, images, fixed, in_place)
    name = f"fused_{layer.name}"
    module.add_module(name, _module_for(convolution, workload))
    with module.graph.inserting_before(chain[-1]):
        call = module.graph.call_module(name, (layer.args[0],) if other is None else (layer.args[0], other))
    call.meta = dict(chain[-1].meta)
    chain[-1].replace_all_uses_with(call)
    for node in reversed(chain):
        module.graph.erase_node(node)


def _module_for(layer: Convolution, workload: Workload) -> nn.Module:
    """The fastest way to compute this layer."""
    if (matrix := matrix_of(layer)) is not None:
        return SmallConv(layer, matrix, workload)
    fused = FusedConv(layer, workload)
    return WinogradConv(layer, fused) if suits_winograd(layer) else fused


def _added(layer: fx.Node, following: fx.Node) -> fx.Node | None:
    """The tensor of the same shape and dtype that is added to a layer's output."""
    if following.target != aten.add.Tensor or following.kwargs or len(following.args) != 2:
        return None
    others = [each for each in following.args if each is not layer]
    one, two = value_of(layer), value_of(others[0]) if len(others) == 1 else None
    same = one is not None and two is not None and one.shape == two.shape and one.dtype == two.dtype
    return others[0] if same and isinstance(others[0], fx.Node) else None


def _is_last_use(value: fx.Node, layer: fx.Node) -> bool:
    """Whether a value can be overwritten by the layer to whose output it is added: all its other users come before the layer.

    Only convolutions may compute and read it, because the outputs of other operators may share its memory.
    """
    others = [user for user in value.users if user is not only_user(layer)]
    convolutions = all(each.op == "call_module" or each.target == CONV for each in (value, *others))
    return convolutions and all(user < layer for user in others)
