"""Decomposes operators that a bundle does not allow into allowed ones: with torch's decompositions, and with some that torch lacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from multiworld_serving.models.bundle.operators import OPERATORS

_MEAN, _MAX = 1, 2
"""Modes of `embedding_bag`; 0 is the sum."""


@cache
def decompositions() -> dict[torch._ops.OperatorBase, Callable[..., Any]]:
    """For `ExportedProgram.run_decompositions`. Operators without an entry stay in the graph."""
    known: dict[torch._ops.OperatorBase, Callable[..., Any]] = torch.export.default_decompositions()
    table = {each: function for each, function in known.items() if str(each) not in OPERATORS}
    aten = torch.ops.aten
    return table | {
        aten.copy.default: _copy,
        aten._embedding_bag.default: _embedding_bag,
        aten._embedding_bag_forward_only.default: _embedding_bag,
        aten._upsample_bilinear2d_aa.default: lambda *arguments: _resize(_triangle, 1, *arguments),
        aten._upsample_bicubic2d_aa.default: lambda *arguments: _resize(_cubic, 2, *arguments),
    }


def _copy(target: Tensor, source: Tensor, _non_blocking: bool = False) -> Tensor:
    return source.to(target.dtype).expand(target.shape).clone(memory_format=torch.contiguous_format)


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    _scale_grad_by_freq: bool = False,
    mode: int = 0,
    _sparse: bool = False,
    factors: Tensor | None = None,
    include_last_offset: bool = False,
    padding: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The bags [bags,D] of indices [N]. Only a backward pass uses the other results."""
    starts = offsets[:-1] if include_last_offset else offsets
    shape = (starts.shape[0], weight.shape[1])
    bags = torch.bucketize(torch.arange(indices.shape[0], device=indices.device), starts, right=True) - 1
    rows, ignored = weight[indices], (indices == padding)[:, None]
    if mode == _MAX:
        rows = rows.masked_fill(ignored, -torch.inf)
        most = weight.new_full(shape, -torch.inf).scatter_reduce(0, bags[:, None].expand_as(rows), rows, "amax")
        return most.masked_fill(most == -torch.inf, 0), offsets, offsets, offsets
    if factors is not None:
        rows = rows * factors[:, None]
    found = weight.new_zeros(shape).index_add(0, bags, rows.masked_fill(ignored, 0))
    if mode == _MEAN:
        counts = weight.new_zeros((shape[0], 1)).index_add(0, bags, (~ignored).to(weight.dtype))
        found = found / counts.clamp_min(1)
    return found, offsets, offsets, offsets


def _resize(
    weight_of: Callable[[Tensor], Tensor],
    support: int,
    image: Tensor,
    size: tuple[int, int],
    align_corners: bool,
    *factors: float | None,
) -> Any:
    """Resize images [B,C,H,W] with antialiasing: each side is multiplied by a matrix. As in torch's UpSampleKernel.cpp."""
    if not image.is_floating_point():
        return NotImplemented  # torch rounds each pass
    given = (*factors, None, None)
    rows, columns = (
        _weights(weight_of, support, length, most, align_corners, factor, image)
        for length, most, factor in zip(image.shape[2:], size, given, strict=False)
    )
    return rows @ image @ columns.T


def _weights(
    weight_of: Callable[[Tensor], Tensor],
    support: int,
    before: int,
    after: int,
    align_corners: bool,
    factor: float | None,
    image: Tensor,
) -> Tensor:
    """The matrix [after,before] that resizes one side."""
    scale = 1 / factor if factor else before / after
    if align_corners:
        scale = (before - 1) / (after - 1) if after > 1 else 0.0
    stretch = max(scale, 1.0)
    centers = (torch.arange(after, dtype=torch.float64, device=image.device)[:, None] + 0.5) * scale
    pixels = torch.arange(before, dtype=torch.float64, device=image.device)
    first, end = ((centers + side * support * stretch + 0.5).trunc() for side in (-1, 1))
    weights = weight_of((pixels - centers + 0.5) / stretch).masked_fill((pixels < first) | (pixels >= end), 0)
    return (weights / weights.sum(1, keepdim=True)).to(image.dtype)


def _triangle(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp_min(0)


def _cubic(x: Tensor) -> Tensor:
    """Keys' cubic with a = -0.5, as in Pillow."""
    x = x.abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = -0.5 * (((x - 5) * x + 8) * x - 4)
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
