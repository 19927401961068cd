"""Rewrites a stage for a device, if its output stays accurate.

Folds batch normalisation into weights, uses channels-last layout and a lower precision, and fuses convolutions.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from multiworld_serving.models.bundle.stage import BundleStage
from multiworld_serving.models.optimize.convolutions import Workload
from multiworld_serving.models.optimize.deviation import TOLERANCE, deviation_of_rows
from multiworld_serving.models.optimize.fusing import fusable, fuse
from multiworld_serving.models.optimize.graphs import (
    CONV,
    add_constant,
    aten,
    constant,
    copy_of,
    only_user,
    place,
    propagate,
    value_of,
)
from multiworld_serving.models.optimize.precision import lower
from multiworld_serving.models.optimize.tuning import ExecutionMode, Tuning

logger = logging.getLogger(__name__)

_LINEAR = aten.linear.default
_BATCH_NORM = aten._native_batch_norm_legit_no_training.default
_SHAPE_ROWS = 2
"""Batch size for computing shapes. With 1, a weight that is the same for all rows would have the shape of an activation."""
_CHECKED_ROWS = 2


@dataclass(frozen=True)
class OptimizedStage:
    """A stage that is ready to run.

    Attributes:
        module: on the device; rows in, rows out, as the stage.
        why: reason for the mode, for the log.
    """

    module: nn.Module
    mode: ExecutionMode
    why: str

    def __call__(self, batch: Tensor) -> Tensor:
        """Compute a batch on its device in the precision of `mode`."""
        with self.mode.active(batch.device):
            output: Tensor = self.module(batch)
        return output

    def __str__(self) -> str:
        """Method, precision, which is that of most weights, and the reason, for the log."""
        elements = Counter[torch.dtype]()
        for weight in chain(self.module.parameters(), self.module.buffers()):
            if weight.is_floating_point():
                elements[weight.dtype] += weight.numel()
        dtype = max(elements, key=elements.__getitem__, default=self.mode.dtype)
        precision = self.mode.precision if dtype == self.mode.dtype else str(dtype).removeprefix("torch.")
        return f"{self.mode.method}/{precision} ({self.why})"


def optimize(
    stage: BundleStage,
    max_batch_size: int,
    tuning: Tuning,
    device: torch.device,
    threads: tuple[int, ...] = (),
) -> OptimizedStage:
    """Rewrite `stage` and move it to `device`; it stays as written if its graph cannot be rewritten or is not accurate enough then.

    With the tuning "compile" it is fused, too: compiling takes minutes, and `CompiledStage` does it.

    Args:
        stage: on the CPU, with weights. It may become part of the result.
        threads: numbers of threads that may compute a batch on a CPU; weight layouts depend on them. Empty: torch's current number.
    """
    mode, why = ExecutionMode("fused", tuning.stage_precision(device)), "asked for"
    if tuning.optimize != "eager":
        workload = Workload(max_batch_size, threads or (torch.get_num_threads(),))
        example = stage.spec.example(min(max_batch_size, _CHECKED_ROWS))
        try:
            with torch.inference_mode():
                expected = stage(example)
            made = folded(stage, workload, mode.dtype, fused=fusable(device, mode.dtype))
            place(made.module, device)
            with torch.inference_mode(), mode.active(device):
                off = deviation_of_rows(made(example.to(device)).cpu(), expected, stage.spec, mode.precision)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - rewrites and operators raise many types, and graphs may be of any model
            why = f"{mode} cannot be built ({str(error).strip().partition(chr(10))[0]})"
        else:
            if off <= TOLERANCE[mode.precision]:
                return OptimizedStage(made, mode, f"{off:.1g} off")
            why = f"{mode} is {off:.2g} off where {TOLERANCE[mode.precision]:g} is allowed"
        logger.warning("stage %d is computed as written, slower and in float32: %s", stage.spec.index, why)
    place(stage.module, device)
    return OptimizedStage(stage.to(device), ExecutionMode("eager"), why)


def folded(
    stage: BundleStage, workload: Workload, dtype: torch.dtype = torch.float32, *, fused: bool = False
) -> BundleStage:
    """A stage with folded weights, in channels-last layout and any precision inside.

    Args:
        stage: not changed, and no weight is shared with it.
        dtype: of weights and activations inside.
        fused: also fuse convolutions for this workload (see `fusing`; check `fusable` first).
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        module = copy_of(stage.module)
        example = stage.spec.example(_SHAPE_ROWS)
        propagate(module, stage.spec.input_rows.unpack(example))
        fold_batch_norm(module)
        _use_channels_last(module)
        if dtype != torch.float32:
            lower(module, dtype)
        _lay_out_weights(module)
        if fused:
            fuse(module, workload, _SHAPE_ROWS, fixed=not stage.spec.input_rows.varies)
        module.graph.eliminate_dead_code()
        body = fx.GraphModule(module, module.graph)  # without the weights that are no longer used
        for each in body.modules():
            # The received weights are parts of one file, and one of them keeps all of it in memory.
            for name, weight in list(each.named_buffers(recurse=False)):
                setattr(each, name, weight.clone())
    return BundleStage(stage.spec, body)


def fold_batch_norm(module: fx.GraphModule) -> None:
    """Fold every batch normalisation that follows a convolution or linear layer into its weights."""
    for norm in list(module.graph.nodes):
        picked = only_user(norm) if norm.target == _BATCH_NORM else None
        if picked is None or picked.target is not operator.getitem or picked.args[1] != 0:
            continue
        layer, eps = norm.args[0], norm.args[6]
        gamma, beta, mean, variance = (constant(module, each) for each in norm.args[1:5])
        if mean is None or variance is None or not _is_foldable(module, layer):
            continue
        weight, bias = (constant(module, each) for each in (*layer.args[1:3], None)[:2])
        assert weight is not None
        folded = fuse_conv_bn_weights(weight, bias, mean, variance, eps, gamma, beta)  # fits linear layers, too
        layer.args = (layer.args[0], *(add_constant(module, layer, each.detach()) for each in folded), *layer.args[3:])
        picked.replace_all_uses_with(layer)
        module.graph.erase_node(picked)
        module.graph.erase_node(norm)


def _is_foldable(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the node is a convolution or linear layer with fixed weights, used once."""
    if node.target not in (CONV, _LINEAR) or only_user(node) is None or node.kwargs:
        return False
    value = value_of(node)
    fixed = all(each is None or constant(module, each) is not None for each in node.args[1:3])
    return fixed and value is not None and (node.target == CONV or value.dim() == 2)


def _use_channels_last(module: fx.GraphModule) -> None:
    """Convert image inputs to channels-last if there are convolutions. Operators keep the layout of their input."""
    if not any(node.target == CONV for node in module.graph.nodes):
        return
    for node in list(module.graph.nodes):
        value = value_of(node)
        if node.op == "placeholder" and value is not None and value.dim() == 4:
            image = _prepared(node)
            users = list(image.users)
            with module.graph.inserting_after(image):
                kwargs: dict[str, Any] = {"memory_format": torch.channels_last}
                converted = module.graph.call_function(aten.contiguous.default, (image,), kwargs)
            converted.meta = dict(image.meta)
            for user in users:
                user.replace_input_with(image, converted)


def _prepared(image: fx.Node) -> fx.Node:
    """The last one of the element-wise operators that prepare an image: with 3 channels, channels-last makes them 3 times slower."""
    while True:
        following = [user for user in image.users if value_of(user) is not None]
        if len(following) != 1 or not _prepares(following[0]):
            return image
        (image,) = following


def _prepares(node: fx.Node) -> bool:
    """Whether a node computes an image from one and from constants, element by element."""
    value, target = value_of(node), node.target
    given = [each for each in node.all_input_nodes if each.op != "get_attr"]
    if value is None or value.dim() != 4 or len(given) != 1 or not isinstance(target, torch._ops.OpOverload):
        return False
    return target is aten._to_copy.default or torch.Tag.pointwise in target.tags


def _lay_out_weights(module: fx.GraphModule) -> None:
    for conv in [node for node in module.graph.nodes if node.target == CONV]:
        weight = constant(module, conv.args[1])
        if weight is not None:
            laid_out = weight.contiguous(memory_format=torch.channels_last)
            conv.update_arg(1, add_constant(module, conv, laid_out))
