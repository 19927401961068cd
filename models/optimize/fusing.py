"""Fused oneDNN convolutions and linear layers: bias, addition and activation in one pass, with weights in oneDNN's preferred layout.

Inductor generates the same operations for a frozen model on a CPU. Calling them directly needs no compiler. They are private
operations of torch: `fusable` checks whether this torch has them; without them stages run unfused.

oneDNN's preferred layout depends on the number of threads and the batch size: with AVX-512, a seventh of ResNet-50's convolutions prefer
their own layout for one sample on two threads. Weights in another layout are reordered in every call, which makes the whole model 2 to 3
times slower. So the weights are kept in each preferred layout, which for most convolutions is a single one.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from multiworld_serving.models.optimize.graphs import aten, constant, only_user, value_of

_NEEDED = (
    "_convolution_pointwise",
    "_reorder_convolution_weight",
    "_linear_pointwise",
    "_reorder_linear_weight",
    "data_ptr",
    "_nbytes",
)
_CONV, _LINEAR = aten.conv2d.default, aten.linear.default
_DEFAULT_WINDOW: tuple[Any, ...] = ([1, 1], [0, 0], [1, 1], 1)
"""Stride, padding, dilation and groups."""
_ACTIVATIONS: dict[Any, str] = {
    aten.relu.default: "relu",
    aten.sigmoid.default: "sigmoid",
    aten.tanh.default: "tanh",
    aten.hardswish.default: "hardswish",
    aten.hardsigmoid.default: "hardsigmoid",
    aten.silu.default: "swish",
    aten.gelu.default: "gelu",
}
Activation = tuple[str, list[float], str]
"""Name in oneDNN, scalars, and algorithm."""
_NO_ACTIVATION: Activation = ("none", [], "")


@dataclass(frozen=True)
class Workload:
    """Batch sizes and thread counts to optimize for. Others work too, but may be slower.

    Attributes:
        max_batch_size: largest batch size; layouts are chosen for this size and for 1.
        threads: numbers of threads that may compute a batch.
    """

    max_batch_size: int
    threads: tuple[int, ...]


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Set torch's number of threads while the block runs."""
    before = torch.get_num_threads()
    if threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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


class PackedWeight:
    """Weights in each preferred layout. Not a parameter: such tensors can be neither saved nor moved.

    Args:
        reorder: the weights in the preferred layout for one sample, or for a full batch.
    """

    def __init__(self, reorder: Callable[[bool], Tensor], workload: Workload) -> None:
        self._layouts: dict[tuple[int, bool], Tensor] = {}
        """By number of threads, and whether the batch has more than one sample."""
        kept: list[Tensor] = []
        for threads in workload.threads:
            with torch_threads(threads):
                for is_batch in (False, True)[: workload.max_batch_size]:
                    packed = reorder(is_batch)
                    same = next((other for other in kept if _identical(packed, other)), packed)
                    if same is packed:
                        kept.append(packed)
                    self._layouts[threads, is_batch] = same
        self._otherwise = same

    def wanted_for(self, is_batch: bool) -> Tensor:
        """The weights for torch's current number of threads."""
        return self._layouts.get((torch.get_num_threads(), is_batch), self._otherwise)


def _identical(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors in oneDNN layouts are equal byte for byte."""
    size = torch.ops.mkldnn._nbytes(one)
    if size != torch.ops.mkldnn._nbytes(other):
        return False
    places = (ctypes.c_void_p(torch.ops.mkldnn.data_ptr(tensor)) for tensor in (one, other))
    difference: int = ctypes.CDLL(None).memcmp(*places, ctypes.c_size_t(size))
    return difference == 0


class FusedConv(nn.Module):
    """A convolution with bias, optional addition, and activation, in channels-last layout.

    Args:
        weight, bias: of aten's conv2d.
        window: padding, stride, dilation and groups.
        shape: [B,C,H,W] of an input of `rows` samples.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        window: tuple[Any, ...],
        activation: Activation,
        workload: Workload,
        shape: Sequence[int],
        rows: int,
    ) -> None:
        super().__init__()
        self._window, self._bias, self._activation = window, bias, activation
        self._one = shape[0] // rows

        def reorder(is_batch: bool) -> Tensor:
            images = self._one * (workload.max_batch_size if is_batch else 1)
            packed: Tensor = torch.ops.mkldnn._reorder_convolution_weight(weight, *window, (images, *shape[1:]))
            return packed

        self.weight = PackedWeight(reorder, workload)

    def forward(self, batch: Tensor, other: Tensor | None = None) -> Tensor:
        """The activation of the convolution plus `other`."""
        batch = batch.contiguous(memory_format=torch.channels_last)
        operations = torch.ops.mkldnn
        weight = self.weight.wanted_for(len(batch) > self._one)
        output: Tensor
        if other is None:
            output = operations._convolution_pointwise(batch, weight, self._bias, *self._window, *self._activation)
            return output
        name, scalars, algorithm = self._activation
        settings = (*self._window, "add", 1.0, None if name == "none" else name, scalars, algorithm)
        output = operations._convolution_pointwise.binary(batch, other, weight, self._bias, *settings)
        return output


class FusedLinear(nn.Module):
    """A linear layer with bias, and an activation or an addition.

    Args:
        weight, bias: of aten's linear.
        count: number of vectors in an input of one sample.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: Activation, workload: Workload, count: int
    ) -> None:
        super().__init__()
        self._bias, self._activation, self._one, self._features = bias, activation, count, weight.shape[1]

        def reorder(is_batch: bool) -> Tensor:
            vectors = count * (workload.max_batch_size if is_batch else 1)
            packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, vectors)
            return packed

        self.weight = PackedWeight(reorder, workload)

    def forward(self, batch: Tensor, other: Tensor | None = None) -> Tensor:
        """The activation of the linear layer, or its sum with `other`."""
        weight = self.weight.wanted_for(batch.numel() > self._one * self._features)
        linear = torch.ops.mkldnn._linear_pointwise
        output: Tensor
        if other is None:
            output = linear(batch, weight, self._bias, *self._activation)
        else:
            output = linear.binary(batch, other, weight, self._bias, "add")
        return output


def fuse(module: fx.GraphModule, workload: Workload, rows: int) -> None:
    """Replace convolutions and linear layers with fixed weights, and what follows them, by modules.

    Args:
        module: folded, channels-last, with values of `rows` samples (see `propagate`).
    """
    for node in list(module.graph.nodes):
        if node.target in (_CONV, _LINEAR) and (weight := constant(module, node.args[1])) is not None:
            _fuse_layer(module, node, weight, workload, rows)


def _fuse_layer(module: fx.GraphModule, layer: fx.Node, weight: Tensor, workload: Workload, rows: int) -> None:
    bias_node = layer.args[2] if len(layer.args) > 2 else None
    bias, given = constant(module, bias_node), value_of(layer.args[0])
    is_conv = layer.target == _CONV
    if layer.kwargs or (bias_node is not None and bias is None) or given is None or (is_conv and given.dim() != 4):
        return
    other, activation, chain = None, None, [layer]
    following = only_user(layer)
    if following is not None and (other := _added(layer, following)) is not None:
        chain.append(following)
        following = only_user(following) if is_conv else None
    if following is not None and (activation := _activation(following, after_add=other is not None)) is not None:
        chain.append(following)
    bias = None if bias is None else bias.clone()  # see `_own_memory`
    applied = activation or _NO_ACTIVATION
    made: nn.Module
    if is_conv:
        found: tuple[Any, ...] = layer.args[3:]
        stride, padding, dilation, groups = found + _DEFAULT_WINDOW[len(found) :]
        window = padding, stride, dilation, groups
        made = FusedConv(weight, bias, window, applied, workload, given.shape, rows)
    else:
        made = FusedLinear(weight, bias, applied, workload, max(given.numel() // weight.shape[1] // rows, 1))
    name = f"fused_{layer.name}"
    module.add_module(name, made)
    with module.graph.inserting_before(chain[-1]):
        call = module.graph.call_module(name, (layer.args[0],) if other is None else (layer.args[0], other))
    call.meta = dict(chain[-1].meta)
    chain[-1].replace_all_uses_with(call)
    for node in reversed(chain):
        module.graph.erase_node(node)


def _added(layer: fx.Node, following: fx.Node) -> fx.Node | None:
    """The tensor of the same shape and dtype that is added to a layer's output."""
    if following.target != aten.add.Tensor or following.kwargs or len(following.args) != 2:
        return None
    others = [each for each in following.args if each is not layer]
    one, two = value_of(layer), value_of(others[0]) if len(others) == 1 else None
    same = one is not None and two is not None and one.shape == two.shape and one.dtype == two.dtype
    return others[0] if same and isinstance(others[0], fx.Node) else None


def _activation(node: fx.Node, *, after_add: bool) -> Activation | None:
    name = _ACTIVATIONS.get(node.target)
    if name is None or (after_add and name != "relu"):
        return None
    if name == "gelu":
        return name, [], str(node.kwargs.get("approximate", "none"))
    return None if node.kwargs or len(node.args) > 1 else (name, [], "")
