"""Quantization of transfers with a stated error: 8 bits per element, or bfloat16.

Elements are quantized in blocks of `BLOCK`, each with its own scale. Small tensors of one dtype in the same call share blocks, so use
separate calls for tensors of very different magnitudes. For an element x in a block with the range `low` to `high`
(ZERO_POINT_SCALE: that range extended to include zero), the error is at most

    MIN_MAX             (high - low) / 510            half of one of 255 steps
    ZERO_POINT_SCALE    (high - low) / 255            one step, because the zero point is rounded too; zero has no error
    BFLOAT16            |x| / 256                     above the smallest normal number of the format

plus rounding in the dtype of the tensor: 2^-21 (float32), 2^-50 (float64) or 2^-7 (bfloat16) of the largest magnitude in the block. A
block that has a NaN or an infinity, or whose range exceeds the largest number of its dtype, becomes NaN on all members.
"""

from enum import StrEnum

import torch
from torch import Tensor

BLOCK = 2048
"""Elements that share a scale. The scale and the offset take 8 or 16 bytes per block, which is less than 1 %."""
_LEVELS = 255
"""Largest quantized value."""


class Quantization(StrEnum):
    """The transfer format of an all-reduce."""

    MIN_MAX = "min_max"
    """uint8 between the minimum and the maximum of a block."""
    ZERO_POINT_SCALE = "zero_point_scale"
    """uint8 with an exact zero, for tensors with many zeros."""
    BFLOAT16 = "bfloat16"
    """bfloat16, for float32 and float64."""


_DTYPES = {
    Quantization.MIN_MAX: (torch.float32, torch.float64, torch.bfloat16),
    Quantization.ZERO_POINT_SCALE: (torch.float32, torch.float64, torch.bfloat16),
    Quantization.BFLOAT16: (torch.float32, torch.float64),
}


def check_quantizable(name: str, dtype: torch.dtype, reduction: str, quantization: Quantization) -> None:
    """Raise TypeError or ValueError for dtypes and reductions without an error bound: integers, products."""
    if dtype not in _DTYPES[quantization]:
        raise TypeError(
            f"{name}: {dtype} cannot be quantized as {quantization}; expected one of {_DTYPES[quantization]}"
        )
    if reduction == "PROD":
        raise ValueError(
            f"{name}: the error of a product of quantized numbers has no bound; reduce without quantization"
        )


def wire_bytes(count: int, dtype: torch.dtype, quantization: Quantization) -> int:
    """Return the number of bytes that `count` quantized elements take."""
    if quantization is Quantization.BFLOAT16:
        return 2 * count
    return count + 2 * _blocks(count) * _scale_dtype(dtype).itemsize


def quantize(values: Tensor, quantization: Quantization) -> Tensor:
    """Quantise the flat tensor `values`. Returns uint8 [wire_bytes]."""
    if quantization is Quantization.BFLOAT16:
        return values.to(torch.bfloat16).view(torch.uint8)
    blocks = _in_blocks(values)
    low, high = blocks.amin(dim=1, keepdim=True), blocks.amax(dim=1, keepdim=True)
    if quantization is Quantization.ZERO_POINT_SCALE:
        low, high = low.clamp(max=0), high.clamp(min=0)
    scale = (high - low) / _LEVELS
    if quantization is Quantization.ZERO_POINT_SCALE:
        offset = torch.where(scale > 0, (-low / scale).round_(), 0.0)  # the zero point, an integer
        steps = (blocks / scale).round_().add_(offset)
    else:
        offset = low
        steps = blocks.sub_(low).div_(scale).round_()
    scale[~(high - low).isfinite()] = torch.nan
    levels = steps.nan_to_num_(nan=0.0).clamp_(0, _LEVELS).to(torch.uint8).view(-1)[: values.numel()]
    head = torch.cat((offset.view(-1), scale.view(-1))).view(torch.uint8)
    return torch.cat((head, levels))


def dequantize(wire: Tensor, count: int, dtype: torch.dtype, quantization: Quantization) -> Tensor:
    """Return the elements that `quantize` encoded, `dtype` [count]."""
    if quantization is Quantization.BFLOAT16:
        return wire.view(torch.bfloat16).to(dtype)
    blocks, scales = _blocks(count), _scale_dtype(dtype)
    head = 2 * blocks * scales.itemsize
    offset, scale = wire[:head].clone().view(scales).view(2, blocks, 1)  # a copy, for alignment
    levels = torch.zeros(blocks * BLOCK, dtype=scales)
    levels[:count] = wire[head:]
    steps = levels.view(blocks, BLOCK)
    around_zero = quantization is Quantization.ZERO_POINT_SCALE
    values = steps.sub_(offset).mul_(scale) if around_zero else steps.mul_(scale).add_(offset)
    return values.view(-1)[:count].to(dtype)


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _in_blocks(values: Tensor) -> Tensor:
    """Copy to [blocks, BLOCK] in the dtype of the scales. The last block is padded with its last element."""
    count = values.numel()
    filled = torch.empty(_blocks(count) * BLOCK, dtype=_scale_dtype(values.dtype))
    filled[:count] = values
    filled[count:] = filled[count - 1]
    return filled.view(-1, BLOCK)
