"""Fused oneDNN convolutions: bias, addition and activation in one pass, with weights in oneDNN's preferred layout.

Convolutions of images of a few pixels become matrix products (`SmallConv`): oneDNN is 2 to 4 times slower there, and in bfloat16 with AMX
up to 30 times.

Inductor generates the same operations for a frozen model on a CPU. Calling them directly needs no compiler. They are private
operations of torch: `fusable` checks whether this torch has them. Without them stages run unfused. Linear layers are not fused, because
torch's own are faster in float32.

oneDNN's preferred layout depends on the number of threads and the batch size: with AVX-512, a seventh of ResNet-50's convolutions prefer
their own layout for one sample on two threads. Weights in another layout are reordered in every call, which makes the whole model 2 to 3
times slower. So the weights are kept in each preferred layout, which for most convolutions is a single one.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx, nn

from multiworld_serving.models.optimize.graphs import CONV, aten, constant, only_user, value_of

_NEEDED = (
    *("_convolution_pointwise", "_reorder_convolution_weight", "data_ptr", "_nbytes"),
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
_MOST_GROWTH = 2
"""A convolution becomes a matrix product if the matrix has at most this many times the elements of the weights."""


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


class FusedConv(nn.Module):
    """A convolution with bias, optional addition, and activation, in channels-last layout.

    The weights are in oneDNN's layouts, so they are no parameters: such tensors can be neither saved nor moved.

    Args:
        weight, bias: of aten's conv2d.
        window: padding, stride, dilation and groups.
        activation: its name in oneDNN; None if there is none.
        shape: [B,C,H,W] of an input of `rows` samples.
    """

    bias: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        window: tuple[Any, ...],
        activation: str | None,
        workload: Workload,
        shape: Sequence[int],
        rows: int,
    ) -> None:
        super().__init__()
        self.register_buffer("bias", bias)
        self._window, self._activation = window, activation
        self._one = shape[0] // rows
        self._layouts: dict[tuple[int, bool], Tensor] = {}
        """The weights by number of threads, and whether the batch has more than one sample."""
        kept: list[Tensor] = []
        for threads in workload.threads:
            with torch_threads(threads):
                for is_batch in (False, True)[: workload.max_batch_size]:
                    images = self._one * (workload.max_batch_size if is_batch else 1)
                    packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *window, (images, *shape[1:]))
                    same = next((other for other in kept if _identical(packed, other)), packed)
                    if same is packed:
                        kept.append(packed)
                    self._layouts[threads, is_batch] = same
        self._otherwise = same

    def weight_for(self, samples: int) -> Tensor:
        """The weights for such a batch on torch's current number of threads."""
        return self._layouts.get((torch.get_num_threads(), samples > self._one), self._otherwise)

    def forward(self, batch: Tensor, other: Tensor | None = None) -> Tensor:
        """The activation of the convolution plus `other`."""
        batch = batch.contiguous(memory_format=torch.channels_last)
        weight, activation = self.weight_for(len(batch)), self._activation
        convolution = torch.ops.mkldnn._convolution_pointwise
        output: Tensor
        if other is None:
            output = convolution(batch, weight, self.bias, *self._window, activation or "none", [], "")
        else:
            settings = (*self._window, "add", 1.0, activation, [], "")
            output = convolution.binary(batch, other, weight, self.bias, *settings)
        return output


class SmallConv(nn.Module):
    """A convolution of images of a few pixels with what `FusedConv` adds, as a product of the flattened images with one matrix.

    Args:
        matrix: of `matrix_of`.
        bias, activation: as for `FusedConv`.
    """

    bias: Tensor | None

    def __init__(self, matrix: Tensor, bias: Tensor | None, activation: str | None, images: int) -> None:
        super().__init__()
        self._size = matrix.shape[:3]
        """Of an output: height, width and channels."""
        weight = matrix.flatten(3).flatten(0, 2)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, images)
        self.register_buffer("bias", None if bias is None else bias.repeat(math.prod(self._size[:2])))
        self._activation = activation

    def forward(self, batch: Tensor, other: Tensor | None = None) -> Tensor:
        """As `FusedConv`."""
        rows, multiply = _flat(batch), torch.ops.mkldnn._linear_pointwise
        if other is None:
            output = multiply(rows, self._weight, self.bias, self._activation or "none", [], "")
        else:
            output = multiply.binary(rows, _flat(other), self._weight, self.bias, "add")
            if self._activation is not None:
                output = output.relu_()
        images: Tensor = output.view(len(batch), *self._size).permute(0, 3, 1, 2)
        return images


def _flat(images: Tensor) -> Tensor:
    """[B,C,H,W] as [B,H*W*C]."""
    return images.permute(0, 2, 3, 1).reshape(len(images), -1)


def matrix_of(weight: Tensor, window: tuple[Any, ...], given: Sequence[int], made: Sequence[int]) -> Tensor | None:
    """The matrix [Ho,Wo,K,H,W,C] by which such a convolution multiplies an image, if it has no zeros and is not too large.

    Zeros would turn an infinite pixel into NaN in outputs that do not depend on it.

    Args:
        weight, window: as for `FusedConv`.
        given, made: [B,C,H,W] of input and output.
    """
    (padding, stride, dilation, groups), (height, width), taps = window, given[2:], weight.shape[2:]
    if groups != 1 or math.prod(given[2:]) * math.prod(made[2:]) > _MOST_GROWTH * math.prod(taps):
        return None
    matrix = weight.new_zeros(*made[2:], weight.shape[0], height, width, weight.shape[1])
    pairs = 0
    for y, x, down, across in product(*map(range, (*made[2:], *taps))):
        row, column = y * stride[0] - padding[0] + down * dilation[0], x * stride[1] - padding[1] + across * dilation[1]
        if 0 <= row < height and 0 <= column < width:
            matrix[y, x, :, row, column] = weight[:, :, down, across]
            pairs += 1
    return matrix if pairs == math.prod(given[2:]) * math.prod(made[2:]) else None


def _identical(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors in oneDNN layouts are equal byte for byte."""
    size = torch.ops.mkldnn._nbytes(one)
    if size != torch.ops.mkldnn._nbytes(other):
        return False
    places = (ctypes.c_void_p(torch.ops.mkldnn.data_ptr(tensor)) for tensor in (one, other))
    difference: int = ctypes.CDLL(None).memcmp(*places, ctypes.c_size_t(size))
    return difference == 0


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
    window = padding, stride, dilation, groups
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
    name = f"fused_{layer.name}"
    matrix = matrix_of(weight, window, given.shape, layer.meta["val"].shape) if fixed else None
    fused: nn.Module
    if matrix is None:
        fused = FusedConv(weight, bias, window, activation, workload, given.shape, rows)
    else:
        fused = SmallConv(matrix, bias, activation, len(given) // rows * workload.max_batch_size)
    module.add_module(name, fused)
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
