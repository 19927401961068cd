"""3 x 3 convolutions by Winograd's algorithm F(4x4, 3x3): 36 multiplications for 16 outputs, instead of 144.

Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016). With the usual points 0, 1, -1, 2 and -2, rounding
errors are 5 times as large as with those used here, which are as accurate as oneDNN's convolution (2e-6 of the largest output). Barabasz
and others, "Error Analysis and Improving the Accuracy of Winograd Convolution for Deep Neural Networks" (2020), explain why.

On one core with AVX-512, layers of ResNet-50 and VGG-16 take 0.4 to 0.8 of the time of oneDNN's. The transformed weights take 4 times the
memory of the weights.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from multiworld_serving.models.optimize.convolutions import Convolution, FusedConv

_POINTS = (0.0, 2 / 3, -2 / 3, 3 / 2, -3 / 2)
_SIDE, _WINDOW = 4, 6
"""Side of a tile of outputs, and of the inputs of a tile."""
_LEAST_CHANNELS = 128
"""With fewer, the transforms take as long as is gained."""
_LEAST_TILES = 16
"""In a batch. With fewer, reading the weights takes longer than is gained."""
_LEAST_GAIN = 2
"""Least ratio of multiplications. Tiles at the border may be larger than what is left of an image."""


def suits_winograd(layer: Convolution) -> bool:
    """Whether it is faster for this layer, in batches that are large enough."""
    height, width = layer.made[2:]
    outputs, tiles = height * width, _tiles(height) * _tiles(width)
    return (
        layer.fixed
        and layer.weight.dtype == torch.float32
        and layer.weight.shape[2:] == (3, 3)
        and min(layer.weight.shape[:2]) >= _LEAST_CHANNELS
        and (*layer.stride, *layer.dilation, layer.groups) == (1, 1, 1, 1, 1)
        and layer.activation in (None, "relu")
        and 9 * outputs >= _LEAST_GAIN * _WINDOW**2 * tiles
    )


class WinogradConv(nn.Module):
    """A layer for which `suits_winograd` is true.

    An infinite pixel makes all outputs of its tiles NaN.

    Args:
        direct: computes batches of few tiles, and images of another size.
    """

    weight: Tensor
    bias: Tensor
    input_transform: Tensor
    output_transform: Tensor

    def __init__(self, layer: Convolution, direct: FusedConv) -> None:
        super().__init__()
        _, weights, _ = transforms()
        self.direct = direct
        self._given, self._size = layer.given[2:], layer.made[2:]
        self._tiles = _tiles(self._size[0]), _tiles(self._size[1])
        self._is_relu = layer.activation is not None
        (above, outputs, inputs), (before, outputs_across, inputs_across) = (
            _along(*each) for each in zip(self._given, self._size, layer.padding, strict=True)
        )
        self._padding = 0, 0, *before, *above
        self._window, self._side = (inputs.shape[1], inputs_across.shape[1]), (len(outputs), len(outputs_across))
        transformed = torch.einsum("ij,kcjl,ml->imck", weights, layer.weight.double(), weights)
        self.register_buffer("weight", transformed.flatten(0, 1).float().contiguous())
        self.register_buffer("bias", layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias)
        self.register_buffer("input_transform", torch.kron(inputs, inputs_across).float())
        self.register_buffer("output_transform", torch.kron(outputs, outputs_across).float())

    def forward(self, batch: Tensor, other: Tensor | None = None) -> Tensor:
        """See `FusedConv`."""
        images, (down, across), (height, width) = len(batch), self._tiles, self._size
        if images * down * across < _LEAST_TILES or batch.shape[2:] != self._given:
            output: Tensor = self.direct(batch, other)
            return output
        given, made = self.weight.shape[1:]
        pixels = batch.permute(0, 2, 3, 1)
        pixels = pad(pixels, self._padding).contiguous() if any(self._padding) else pixels.contiguous()
        image, row, column, _ = pixels.stride()
        windows = pixels.as_strided(
            (images, down, across, *self._window, given), (image, row * _SIDE, column * _SIDE, row, column, 1)
        ).reshape(images * down * across, -1, given)
        tiles = torch.matmul(self.input_transform, windows)
        products = torch.bmm(tiles.transpose(0, 1), self.weight).transpose(0, 1)
        bias = self.bias.expand(len(tiles), len(self.output_transform), made)
        parts = torch.baddbmm(bias, self.output_transform.expand(len(tiles), -1, -1), products)
        parts = parts.view(images, down, across, *self._side, made).transpose(2, 3)
        output = parts.reshape(images, down * self._side[0], across * self._side[1], made)[
            :, :height, :width
        ].contiguous()
        if other is not None:
            output += other.permute(0, 2, 3, 1)
        return (output.relu_() if self._is_relu else output).permute(0, 3, 1, 2)


def _tiles(outputs: int) -> int:
    return math.ceil(outputs / _SIDE)


def _along(given: int, made: int, padding: int) -> tuple[tuple[int, int], Tensor, Tensor]:
    """For one dimension: the zeros before and after the image, and the matrices of outputs and inputs of a tile.

    Zeros and outputs outside an image of a single tile are left out of the matrices.
    """
    outputs, _, inputs = transforms()
    if _tiles(made) == 1:
        return (0, 0), outputs[:made], inputs[:, padding : padding + given]
    return (padding, _SIDE * _tiles(made) + 2 - given - padding), outputs, inputs


def transforms() -> tuple[Tensor, Tensor, Tensor]:
    """The matrices of one dimension, in float64: of outputs [4,6], weights [6,3] and inputs [6,6]. One point is infinity.

    The outputs of 3 weights and 6 inputs are outputs @ ((weights @ w) * (inputs @ x)).
    """
    points = np.array(_POINTS)
    others = [np.delete(points, index) for index in range(len(points))]
    outputs = np.column_stack([np.vander(points, _SIDE, increasing=True).T, np.eye(_SIDE)[-1]])
    scale = [np.prod(point - rest) for point, rest in zip(points, others, strict=True)]
    weights = np.vstack([np.vander(points, 3, increasing=True) / np.array(scale)[:, None], np.eye(3)[-1]])
    inputs = np.vstack([*([*np.poly(rest)[::-1], 0.0] for rest in others), np.poly(points)[::-1]])
    return torch.from_numpy(outputs), torch.from_numpy(weights), torch.from_numpy(inputs)
