"""Fewer bytes on the wire, at a known loss: 8 bits an element, or bfloat16.

Numbers are quantised in blocks of `BLOCK` elements, each with a scale of its own. Of an element x in a block from `low` to `high`
(for zero-point-scale: that range, widened so that it holds zero) what comes back differs from x by at most

    MIN_MAX             (high - low) / 510            half a step of 255
    ZERO_POINT_SCALE    (high - low) / 255            a step, for the zero point is rounded as well; zero comes back as zero
    BFLOAT16            |x| / 256                     beyond that format's smallest normal number

and by rounding in the tensor's own dtype: 2^-21 (float32), 2^-50 (float64) or 2^-7 (bfloat16) of the largest magnitude in the block. A
block with a NaN or an infinity, or whose range is larger than its dtype's largest number, comes back as NaN, everywhere the same.
"""

from enum import StrEnum

import torch
from torch import Tensor

BLOCK = 2048
"""Elements that share a scale: 8 or 16 bytes more for each, so under 1 %."""
_LEVELS = 255


class Quantization(StrEnum):
    """How the operands of an all-reduce travel."""

    MIN_MAX = "min_max"
    """uint8 between the smallest and the largest number of a block."""
    ZERO_POINT_SCALE = "zero_point_scale"
    """uint8 around a zero that is exact: for tensors with many zeros."""
    BFLOAT16 = "bfloat16"


_DTYPES = {
    Quantization.MIN_MAX: (torch.float32, torch.float64, torch.bfloat16),
    Quantization.ZERO_POINT_SCALE: (torch.float32, torch.float64, torch.bfloat16),
    Quantization.BFLOAT16: (torch.float32, torch.float64),
}


def check_quantisable(name: str, dtype: torch.dtype, reduction: str, quantization: Quantization) -> None:
    """Raises TypeError or ValueError for what has no stated error: integers, products."""
    if dtype not in _DTYPES[quantization]:
        raise TypeError(
            f"{name}: {dtype} cannot be quantised as {quantization}; expected one of {_DTYPES[quantization]}"
        )
    if reduction == "PROD":
        raise ValueError(
            f"{name}: a product of quantised numbers has no bound on its error; reduce without quantization"
        )


def wire_bytes(count: int, dtype: torch.dtype, quantization: Quantization) -> int:
    """How many bytes `count` elements take."""
    if quantization is Quantization.BFLOAT16:
        return 2 * count
    return count + 2 * _blocks(count) * _scale_dtype(dtype).itemsize


def quantise(values: Tensor, quantization: Quantization) -> Tensor:
    """uint8 [wire_bytes]: flat `values` as they travel."""
    if quantization is Quantization.BFLOAT16:
        return values.to(torch.bfloat16).view(torch.uint8)
    blocks = _in_blocks(values)
    low, high = blocks.amin(dim=1, keepdim=True), blocks.amax(dim=1, keepdim=True)
    if quantization is Quantization.ZERO_POINT_SCALE:
        low, high = low.clamp(max=0), high.clamp(min=0)
    scale = (high - low) / _LEVELS
    if quantization is Quantization.ZERO_POINT_SCALE:
        offset = torch.where(scale > 0, (-low / scale).round_(), 0.0)  # the zero point, a whole number
        steps = (blocks / scale).round_().add_(offset)
    else:
        offset = low
        steps = blocks.sub_(low).div_(scale).round_()
    scale[~(high - low).isfinite()] = torch.nan
    levels = steps.nan_to_num_(nan=0.0).clamp_(0, _LEVELS).to(torch.uint8).view(-1)[: values.numel()]
    head = torch.cat((offset.view(-1), scale.view(-1))).view(torch.uint8)
    return torch.cat((head, levels))


def dequantise(wire: Tensor, count: int, dtype: torch.dtype, quantization: Quantization) -> Tensor:
    """[count] of `dtype`: what `quantise` made of them."""
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
    """A copy as [blocks, BLOCK], in the dtype of the scales; the last block is filled up with its last element."""
    count = values.numel()
    filled = torch.empty(_blocks(count) * BLOCK, dtype=_scale_dtype(values.dtype))
    filled[:count] = values
    filled[count:] = filled[count - 1]
    return filled.view(-1, BLOCK)
