"""Convolutions as oneDNN computes them: bias, addition and activation in one pass, with weights in its preferred layout.

Inductor generates the same operations for a frozen model on a CPU. Calling them directly needs no compiler. They are private
operations of torch: `fusing.fusable` checks whether this torch has them.

oneDNN's preferred layout depends on the number of threads and the batch size: with AVX-512, a seventh of ResNet-50's convolutions prefer
their own layout for one sample on two threads. Weights in another layout are reordered in every call, which makes the whole model 2 to 3
times slower. So the weights are kept in each preferred layout, which for most convolutions is a single one.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True)
class Convolution:
    """A convolution with an activation, in channels-last layout.

    Attributes:
        weight, bias, padding, stride, dilation, groups: of aten's conv2d.
        activation: its name in oneDNN; None if there is none.
        given, made: [B,C,H,W] of an input and its output.
        images: images for each sample of a batch.
        fixed: whether images always have the sizes of `given`.
        in_place: whether the tensor that is added may be overwritten with the output.
    """

    weight: Tensor
    bias: Tensor | None
    padding: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]
    groups: int
    activation: str | None
    given: Sequence[int]
    made: Sequence[int]
    images: int
    fixed: bool
    in_place: bool


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


class FusedConv(nn.Module):
    """Any convolution. The weights are in oneDNN's layouts, so they are no parameters: such tensors can be neither saved nor moved.

    Attributes:
        in_place: see `Convolution`.
    """

    bias: Tensor | None

    def __init__(self, layer: Convolution, workload: Workload) -> None:
        super().__init__()
        self.register_buffer("bias", layer.bias)
        self._window: tuple[Any, ...] = (layer.padding, layer.stride, layer.dilation, layer.groups)
        self._activation, self._one, self.in_place = layer.activation, layer.images, layer.in_place
        self._layouts: dict[tuple[int, bool], Tensor] = {}
        """The weights by number of threads, and whether the batch has more than one sample."""
        kept: list[Tensor] = []
        for threads in workload.threads:
            with torch_threads(threads):
                for is_batch in (False, True)[: workload.max_batch_size]:
                    shape = (self._one * (workload.max_batch_size if is_batch else 1), *layer.given[1:])
                    packed = torch.ops.mkldnn._reorder_convolution_weight(layer.weight, *self._window, shape)
                    same = next((other for other in kept if _identical(packed, other)), packed)
                    if same is packed:
                        kept.append(packed)
                    self._layouts[threads, is_batch] = same
        self._otherwise = same

    def weight_for(self, samples: int) -> Tensor:
        """The weights for such a batch on torch's current number of threads."""
        return self._layouts.get((torch.get_num_threads(), samples > self._one), self._otherwise)

    def forward(self, batch: Tensor, other: Tensor | None = None) -> Tensor:
        """The activation of the convolution plus `other`, which has the shape of the output."""
        batch = batch.contiguous(memory_format=torch.channels_last)
        weight, activation = self.weight_for(len(batch)), self._activation
        operations = torch.ops.mkldnn
        output: Tensor
        if other is None:
            convolution, settings = operations._convolution_pointwise, (*self._window, activation or "none", [], "")
            output = convolution(batch, weight, self.bias, *settings)
            return output
        settings = (*self._window, "add", 1.0, activation, [], "")
        if self.in_place and other.is_contiguous(memory_format=torch.channels_last):  # a tenth faster for 1 x 1
            output = operations._convolution_pointwise_.binary(other, batch, weight, self.bias, *settings)
        else:
            output = operations._convolution_pointwise.binary(batch, other, weight, self.bias, *settings)
        return output


class SmallConv(nn.Module):
    """A convolution of images of a few pixels, as a product of the flattened images with one matrix (see `matrix_of`).

    oneDNN's convolutions are 2 to 4 times slower there, and in bfloat16 with AMX up to 30 times.
    """

    bias: Tensor | None

    def __init__(self, layer: Convolution, matrix: Tensor, workload: Workload) -> None:
        super().__init__()
        self._size = matrix.shape[:3]
        """Of an output: height, width and channels."""
        weight, images = matrix.flatten(3).flatten(0, 2), layer.images * workload.max_batch_size
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, images)
        bias = None if layer.bias is None else layer.bias.repeat(math.prod(self._size[:2]))
        self.register_buffer("bias", bias)
        self._activation = layer.activation

    def forward(self, batch: Tensor, other: Tensor | None = None) -> Tensor:
        """See `FusedConv`. With `other`, the activation is relu."""
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


def matrix_of(layer: Convolution) -> Tensor | None:
    """The matrix [Ho,Wo,K,H,W,C] by which a convolution multiplies an image, if it has no zeros and is not too large.

    Zeros would turn an infinite pixel into NaN in outputs that do not depend on it.
    """
    weight, size, (height, width) = layer.weight, layer.made[2:], layer.given[2:]
    taps, pairs = weight.shape[2:], math.prod((*size, height, width))
    if not layer.fixed or layer.groups != 1 or pairs > _MOST_GROWTH * math.prod(taps):
        return None
    matrix = weight.new_zeros(*size, weight.shape[0], height, width, weight.shape[1])
    for y, x, down, across in product(*map(range, (*size, *taps))):
        row = y * layer.stride[0] - layer.padding[0] + down * layer.dilation[0]
        column = x * layer.stride[1] - layer.padding[1] + across * layer.dilation[1]
        if 0 <= row < height and 0 <= column < width:
            matrix[y, x, :, row, column] = weight[:, :, down, across]
            pairs -= 1
    return None if pairs else matrix


def _identical(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors in oneDNN layouts are equal byte for byte."""
    size = torch.ops.mkldnn._nbytes(one)
    if size != torch.ops.mkldnn._nbytes(other):
        return False
    places = (ctypes.c_void_p(torch.ops.mkldnn.data_ptr(tensor)) for tensor in (one, other))
    difference: int = ctypes.CDLL(None).memcmp(*places, ctypes.c_size_t(size))
    return difference == 0
