"""Computes a graph in bfloat16 or float16: which operators, and where values are converted."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from multiworld_serving.models.bundle.signatures import expect_shapes
from multiworld_serving.models.optimize.graphs import add_constant, aten, constant, value_of


def _overloads(names: str) -> frozenset[Any]:
    """All overloads of these operators."""
    packets = [getattr(aten, name) for name in names.split()]
    return frozenset(getattr(packet, name) for packet in packets for name in packet.overloads())


_FASTER = _overloads(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d linear addmm mm bmm baddbmm matmul scaled_dot_product_attention"
)
"""Computed in the lower precision."""
_EITHER = _overloads(
    "relu relu6 gelu silu hardswish hardsigmoid hardtanh leaky_relu elu sigmoid tanh mish clamp clamp_min clamp_max add sub mul div neg "
    "max_pool2d avg_pool2d adaptive_avg_pool2d mean layer_norm group_norm native_layer_norm native_group_norm batch_norm "
    "_native_batch_norm_legit_no_training cat stack reshape view _unsafe_view permute transpose t unsqueeze squeeze select slice expand "
    "expand_as clone contiguous flatten split split_with_sizes chunk unbind roll repeat flip pad constant_pad_nd pixel_shuffle "
    "upsample_bilinear2d upsample_nearest2d detach alias movedim"
) | {operator.getitem}
"""Computed in the precision of their input: they pass values on, or accumulate in float32 inside."""
_FLOAT32_PARAMETERS = _overloads("batch_norm _native_batch_norm_legit_no_training")
"""Their parameters stay in float32."""


def lower(module: fx.GraphModule, dtype: torch.dtype) -> None:
    """Convert what can be computed in `dtype` with enough accuracy. All else, such as softmax, and the outputs stay in float32.

    The nodes must have values (see `propagate`).
    """
    lowered: set[fx.Node] = set()
    converted: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def convert(node: fx.Node, wanted: torch.dtype, user: fx.Node) -> fx.Node:
        if (node, wanted) in converted:
            return converted[node, wanted]
        weight = constant(module, node)
        if weight is not None:
            first = next(each for each in module.graph.nodes if each.op != "placeholder")
            made = add_constant(module, first, weight.to(wanted))
        else:
            with module.graph.inserting_before(user):
                made = module.graph.call_function(aten.to.dtype, (node, wanted))
            value = value_of(node)
            made.meta["val"] = None if value is None else value.to(wanted)
        converted[node, wanted] = made
        return made

    for node in list(module.graph.nodes):
        if node.op not in ("call_function", "output") or node.target is expect_shapes:
            continue
        floats = [each for each in node.all_input_nodes if each in lowered or _is_float32(each)]
        is_lower = node.target in _FASTER or (node.target in _EITHER and any(each in lowered for each in floats))
        for each in floats:
            if node.target in _FLOAT32_PARAMETERS and each is not node.args[0]:
                continue
            if is_lower and each not in lowered:
                node.replace_input_with(each, convert(each, dtype, node))
            elif not is_lower and each in lowered:
                node.replace_input_with(each, convert(each, torch.float32, node))
        if is_lower and floats:
            lowered.add(node)
            value = node.meta["val"]
            if isinstance(value, torch.Tensor):
                node.meta["val"] = value.to(dtype)


def _is_float32(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype == torch.float32
