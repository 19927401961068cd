"""Folds batch normalisation and input scaling into weights, and uses channels-last layout."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from multiworld_serving.models.bundle.stage import BundleStage
from multiworld_serving.models.optimize.fusing import Workload, add_in_place, fuse
from multiworld_serving.models.optimize.graphs import (
    add_constant,
    aten,
    constant,
    graph_of,
    only_user,
    propagate,
    value_of,
)
from multiworld_serving.models.optimize.precision import lower

_CONV, _LINEAR = aten.conv2d.default, aten.linear.default
_TO_FLOAT = (aten.to.dtype, aten._to_copy.default)
_BATCH_NORM = aten._native_batch_norm_legit_no_training.default
_ARITHMETIC: dict[Any, str] = {
    aten.mul.Tensor: "mul",
    aten.div.Tensor: "div",
    aten.sub.Tensor: "sub",
    aten.add.Tensor: "add",
}
_SHAPE_ROWS = 2
"""Batch size for computing shapes. With 1, a weight that is the same for all rows would have the shape of an activation."""


class FoldedStage(nn.Module):
    """A stage with folded weights, in channels-last layout and any precision inside.

    Same interface as the stage: rows in, rows out, with the same dtypes. Outputs are contiguous.

    Args:
        stage: not changed, and no weight is shared with it.
        dtype: of weights and activations inside.
        fused: also fuse convolutions and linear layers for this workload (see `fusing`; check `fusable` first).
    """

    def __init__(
        self,
        stage: BundleStage,
        workload: Workload,
        dtype: torch.dtype = torch.float32,
        *,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.spec = stage.spec
        with torch.inference_mode(mode=False), torch.no_grad():
            module = graph_of(stage)
            example = stage.spec.example(_SHAPE_ROWS, workload.sample_shape)
            propagate(module, stage.spec.unpack_input(example))
            fold_batch_norm(module)
            _use_channels_last(module)
            if dtype != torch.float16:  # weights divided by 255 would be subnormal
                _fold_scaling(module)
            if dtype != torch.float32:
                lower(module, dtype)
            _lay_out_weights(module)
            if fused:
                fuse(module, workload, _SHAPE_ROWS)
            add_in_place(module)
            module.graph.eliminate_dead_code()
            self.body = fx.GraphModule(module, module.graph)  # without the weights that are no longer used
            _own_memory(self.body, stage)
        self.eval().requires_grad_(False)

    def forward(self, rows: Tensor) -> Tensor:
        """See the class.

        Raises:
            ModelError: these are not rows of the stage's input.
        """
        outputs = self.body(*self.spec.unpack_input(rows))
        return self.spec.pack_output([tensor.contiguous() for tensor in outputs])


def fold_batch_norm(module: fx.GraphModule) -> None:
    """Fold every batch normalisation that follows a convolution or linear layer into its weights."""
    for norm in list(module.graph.nodes):
        if norm.target not in (_BATCH_NORM, aten.batch_norm.default):
            continue
        source, *others = norm.args
        legit = norm.target == _BATCH_NORM
        picked = only_user(norm) if legit else norm
        layer = _layer(module, source)
        statistics = [constant(module, each) for each in others[:4]]
        if layer is None or picked is None or None in (statistics[2], statistics[3]):
            continue
        if not legit and others[4]:  # training
            continue
        if legit and (picked.target is not operator.getitem or picked.args[1] != 0):
            continue
        gamma, beta, mean, variance = statistics
        assert mean is not None
        assert variance is not None
        scale = torch.rsqrt(variance.double() + others[5 if legit else 6])
        if gamma is not None:
            scale = gamma * scale
        offset = (0.0 if beta is None else beta.double()) - mean * scale
        _scale_output(module, layer, scale, offset)
        picked.replace_all_uses_with(layer)
        module.graph.erase_node(picked)
        if legit:
            module.graph.erase_node(norm)


def _layer(module: fx.GraphModule, node: Any) -> fx.Node | None:
    """The node if it is a convolution or linear layer with fixed weights, used once."""
    if not isinstance(node, fx.Node) or node.target not in (_CONV, _LINEAR) or only_user(node) is None:
        return None
    bias = node.args[2] if len(node.args) > 2 else None
    if constant(module, node.args[1]) is None or (bias is not None and constant(module, bias) is None):
        return None
    value = value_of(node)
    is_per_channel = value is not None and (node.target == _CONV or value.dim() == 2)
    return node if is_per_channel and not node.kwargs else None


def _scale_output(module: fx.GraphModule, layer: fx.Node, scale: Tensor, offset: Tensor) -> None:
    """Make a layer compute `scale` times its output, per channel, plus `offset`. Both are float64."""
    weight = constant(module, layer.args[1])
    assert weight is not None
    bias = constant(module, layer.args[2]) if len(layer.args) > 2 else None
    if bias is not None:
        offset = offset + bias.double() * scale
    scaled = weight * scale.to(weight.dtype).view(-1, *[1] * (weight.dim() - 1))
    made = [add_constant(module, layer, each) for each in (scaled, offset.to(weight.dtype))]
    layer.args = (layer.args[0], *made, *layer.args[3:])


def _fold_scaling(module: fx.GraphModule) -> None:
    """Fold multiplications and divisions of a convolution's input by constants into its weights.

    For images, what remains is to subtract the mean of each channel, which turns uint8 into float32 in one pass. The mean cannot be
    folded: the convolution pads with zeros, which represent the mean colour, not black, so results at the borders would differ.
    """
    for conv in module.graph.nodes:
        if conv.target != _CONV or (len(conv.args) > 6 and conv.args[6] != 1):
            continue
        weight, node = constant(module, conv.args[1]), conv.args[0]
        if weight is None or weight.dtype != torch.float32:
            continue
        channels = weight.shape[1]
        scale = torch.ones(channels, dtype=torch.float64, device=weight.device)
        mean = torch.zeros_like(scale)
        while (step := _affine(module, node, scale)) is not None:  # so far: scale * (node - mean)
            node = node.args[0]
            match step:
                case "mul", by:
                    scale, mean = scale * by, mean / by
                case "div", by:
                    scale, mean = scale / by, mean * by
                case "sub", by:
                    mean = mean + by
                case _, by:
                    mean = mean - by
        if node is conv.args[0]:
            continue
        if bool(mean.any()):
            node = _subtract(module, conv, node, mean)
        scaled = add_constant(module, conv, weight * scale.to(weight.dtype).view(1, -1, 1, 1))
        conv.args = (node, scaled, *conv.args[2:])


def _subtract(module: fx.GraphModule, before: fx.Node, node: fx.Node, mean: Tensor) -> fx.Node:
    """Subtract a number per channel from float32 images, or from uint8 ones if these are converted only for this."""
    shape = value_of(node)
    if node.target in _TO_FLOAT and only_user(node) is not None:
        source = value_of(node.args[0])
        if source is not None and source.dtype == torch.uint8:
            node = node.args[0]  # type: ignore[assignment]
    subtracted = add_constant(module, before, mean.to(torch.float32).view(-1, 1, 1))
    with module.graph.inserting_before(before):
        made = module.graph.call_function(aten.sub.Tensor, (node, subtracted))
    made.meta["val"] = shape
    return made


def _affine(module: fx.GraphModule, node: fx.Node, like: Tensor) -> tuple[str, Tensor] | None:
    """The arithmetic of a node with a constant per channel, as float64 [channels].

    None if the node is something else, or its result is used elsewhere, too.
    """
    kind, value = _ARITHMETIC.get(node.target), value_of(node)
    if kind is None or value is None or node.kwargs or only_user(node) is None or value.dtype != torch.float32:
        return None
    given, by = value_of(node.args[0]), node.args[1]
    number = by if isinstance(by, int | float) else constant(module, by)
    if number is None or given is None or given.shape != value.shape:
        return None
    numbers = torch.as_tensor(number, dtype=torch.float64, device=like.device)
    is_per_channel = numbers.dim() in (3, 4) and numbers.shape[-3] == numbers.numel() == like.numel()
    if not is_per_channel and numbers.numel() != 1:
        return None
    numbers = numbers.reshape(-1).expand(like.numel())
    return (kind, numbers) if kind in ("add", "sub") or bool(numbers.all()) else None


def _use_channels_last(module: fx.GraphModule) -> None:
    """Convert image inputs to channels-last if there are convolutions. Operators keep the layout of their input."""
    if not any(node.target == _CONV for node in module.graph.nodes):
        return
    for node in list(module.graph.nodes):
        value = value_of(node)
        if node.op == "placeholder" and value is not None and value.dim() == 4:
            with module.graph.inserting_after(node):
                kwargs: dict[str, Any] = {"memory_format": torch.channels_last}
                converted = module.graph.call_function(aten.contiguous.default, (node,), kwargs)
            converted.meta = dict(node.meta)
            node.replace_all_uses_with(converted, delete_user_cb=lambda user, made=converted: user is not made)


def _lay_out_weights(module: fx.GraphModule) -> None:
    for conv in [node for node in module.graph.nodes if node.target == _CONV]:
        weight = constant(module, conv.args[1])
        if weight is not None:
            laid_out = weight.contiguous(memory_format=torch.channels_last)
            conv.update_arg(1, add_constant(module, conv, laid_out))


def _own_memory(module: nn.Module, stage: BundleStage) -> None:
    """Copy the weights that are still those of the stage. They are parts of the file that was received: one of them keeps all of it."""
    shared = {weight.untyped_storage().data_ptr() for weight in stage.state_dict().values()}
    for each in module.modules():
        for name, value in (*each.named_buffers(recurse=False), *list(vars(each).items())):
            if isinstance(value, Tensor) and not value.is_mkldnn and value.untyped_storage().data_ptr() in shared:
                setattr(each, name, value.clone())
