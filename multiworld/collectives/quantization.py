"""Encodes floating-point numbers for transfer with fewer bytes and a known error.

`bfloat16` and `float16` round each element. The others encode an element as uint8 q, with a scale and an offset for each block of `BLOCK`
elements: x = q * scale + offset. For a block with values from `low` to `high`, the scale is (high - low) / 255, and an element differs
from its decoded value by at most half of that.

    min_max             the offset is `low`, so a block of equal elements is exact
    zero_point_scale    `low` is at most 0, `high` is at least 0, and the offset is a multiple of the scale, so zero is exact

A block that contains NaN or infinity, or whose range is 1e308 or more, decodes to NaN. Computed in float64, so the range of a block of any
other dtype is finite.
"""

from typing import Literal

import torch
from torch import Tensor

BLOCK = 2048
"""Elements that share a scale and an offset, which take 16 bytes: less than 1 %."""
CASTS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
UINT8 = ("min_max", "zero_point_scale")
Quantization = Literal["min_max", "zero_point_scale", "bfloat16"]
"""The formats that a caller can choose."""


def encoded_bytes(count: int, wire_format: str) -> int:
    """Return the number of bytes of `count` encoded elements."""
    return 2 * count if wire_format in CASTS else count + 16 * _blocks(count)


def encode(values: Tensor, wire_format: str) -> Tensor:
    """Encode [n], contiguous, of a floating dtype. Returns uint8 [encoded_bytes(n)], a view of `values` if nothing changes."""
    if wire_format in CASTS:
        return values.to(CASTS[wire_format]).view(torch.uint8)
    count = values.numel()
    padding = values[-1:].expand(_blocks(count) * BLOCK - count)
    blocks = torch.cat((values, padding)).double().view(-1, BLOCK)
    low, high = blocks.amin(dim=1, keepdim=True), blocks.amax(dim=1, keepdim=True)  # `aminmax` takes ten times as long
    if wire_format == "zero_point_scale":
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    scale = (high - low) / 255
    step = torch.where(scale > 0, scale, 1.0)
    offset = low if wire_format == "min_max" else (low / step).round_().mul_(step)
    levels = blocks.sub_(offset).div_(step).round_().clamp_(0, 255).nan_to_num_(0.0).to(torch.uint8)
    valid = high - low < 1e308
    head = torch.cat((torch.where(valid, scale, torch.nan), torch.where(valid, offset, 0.0))).view(-1)
    return torch.cat((head.view(torch.uint8), levels.view(-1)[:count]))


def decode(encoded: Tensor, count: int, dtype: torch.dtype, wire_format: str) -> Tensor:
    """Return the `count` encoded elements of `dtype`, in the dtype in which they are reduced: float64 for float64, else float32."""
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    if wire_format in CASTS:
        return encoded.view(CASTS[wire_format]).to(wide)
    blocks = _blocks(count)
    scale, offset = encoded[: 16 * blocks].view(torch.float64).view(2, blocks, 1)
    levels = torch.zeros(blocks * BLOCK, dtype=torch.float64)
    levels[:count] = encoded[16 * blocks :]
    return levels.view(blocks, BLOCK).mul_(scale).add_(offset).view(-1)[:count].to(wide)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)
