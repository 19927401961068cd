"""Convolutions that add, clip and write once: bias, shortcut and ReLU in the same pass, weights laid out once as oneDNN wants them.

These are the operations that inductor makes of a frozen model on a CPU. Called directly, they need no compiler and no time
to compile. torch offers them to its own compiler: `fusable` asks whether this torch has them, and whoever has not is served
as before.

What layout oneDNN wants depends on how many threads compute how many rows: with AVX-512, a seventh of ResNet-50's convolutions want
one of their own for a lone row on two threads. Weights in another layout are laid out anew in every call, which takes longer than the
convolution: 2 to 3 times for the whole model. So the weights are kept in every layout that is wanted, which is one for nearly all.
"""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

_NEEDED = (
    "_convolution_pointwise",
    "_convolution_pointwise_",
    "_reorder_convolution_weight",
    "data_ptr",
    "_nbytes",
)


@dataclass(frozen=True)
class Uses:
    """For what layouts are chosen. Other batches, and other numbers of threads, work too, and may take longer.

    Attributes:
        row_shape: of one row of the input.
        max_batch_size: rows of the largest batch; a lone row is the other size that is looked at.
        threads: how many may compute a batch.
    """

    row_shape: tuple[int, ...]
    max_batch_size: int
    threads: tuple[int, ...]


@contextmanager
def computing_on(threads: int) -> Iterator[None]:
    """Have torch compute on so many, called from this thread, while the block lasts."""
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
    """Whether convolutions can be fused there: on a CPU with oneDNN, in a precision that it computes."""
    operations = torch.ops.mkldnn
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if not all(hasattr(operations, name) for name in _NEEDED):
        return False
    if dtype == torch.float32:
        return True
    supported = "_is_mkldnn_bf16_supported" if dtype == torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return hasattr(operations, supported) and bool(getattr(operations, supported)())


class _Weight:
    """A convolution's weights, in each layout that is wanted. No parameter: such tensors can neither be saved nor moved."""

    def __init__(self, conv: nn.Conv2d, window: tuple[Any, ...], row_shape: Sequence[int], uses: Uses) -> None:
        self._layouts: dict[tuple[int, bool], Tensor] = {}
        """By the number of threads, and whether there are several rows."""
        kept: list[Tensor] = []
        for threads in uses.threads:
            with computing_on(threads):
                for rows in sorted({1, uses.max_batch_size}):
                    packed = torch.ops.mkldnn._reorder_convolution_weight(
                        conv.weight.detach(), *window, (rows, *row_shape)
                    )
                    same = next((other for other in kept if _identical(packed, other)), packed)
                    if same is packed:
                        kept.append(packed)
                    self._layouts[threads, rows > 1] = same
        self.num_layouts = len(kept)
        self._otherwise = same

    def wanted_for(self, batch: Tensor) -> Tensor:
        """The one for such a batch on the threads that torch computes with now."""
        return self._layouts.get((torch.get_num_threads(), len(batch) > 1), self._otherwise)


def _identical(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors in oneDNN's own layouts are the same, byte for byte."""
    size = torch.ops.mkldnn._nbytes(one)
    if size != torch.ops.mkldnn._nbytes(other):
        return False
    places = (ctypes.c_void_p(torch.ops.mkldnn.data_ptr(tensor)) for tensor in (one, other))
    difference: int = ctypes.CDLL(None).memcmp(*places, ctypes.c_size_t(size))
    return difference == 0


class FusedConv(nn.Module):
    """A convolution with a bias, and a ReLU behind it if wanted. Channels-last in and out.

    Args:
        row_shape: [C,H,W] of its input.
        uses: of the stage that it is in.
    """

    def __init__(self, conv: nn.Conv2d, row_shape: Sequence[int], uses: Uses, *, relu: bool) -> None:
        super().__init__()
        self._window = (conv.padding, conv.stride, conv.dilation, conv.groups)
        self._then = "relu" if relu else "none"
        self.weight = _Weight(conv, self._window, row_shape, uses)
        self._bias = None if conv.bias is None else conv.bias.detach()

    def forward(self, batch: Tensor) -> Tensor:
        """Convolution, bias, and ReLU."""
        output: Tensor = torch.ops.mkldnn._convolution_pointwise(
            batch, self.weight.wanted_for(batch), self._bias, *self._window, self._then, [], ""
        )
        return output

    def add_to(self, shortcut: Tensor, batch: Tensor, *, in_place: bool) -> Tensor:
        """ReLU of the sum of the convolution and `shortcut`, which is overwritten if `in_place`."""
        operations = torch.ops.mkldnn
        add = operations._convolution_pointwise_.binary if in_place else operations._convolution_pointwise.binary
        settings: tuple[Any, ...] = (*self._window, "add", 1.0, "relu", [], "")
        first = (shortcut, batch) if in_place else (batch, shortcut)
        output: Tensor = add(*first, self.weight.wanted_for(batch), self._bias, *settings)
        return output


class FusedBlock(nn.Module):
    """A residual block of torchvision's ResNets, its batch normalisation folded already.

    Args:
        sample: a batch of input, channels-last; only the shape of its rows counts.
        uses: of the stage that it is in.
        owns_input: whether the input may be overwritten when nothing else needs it any more.
    """

    def __init__(self, block: BasicBlock | Bottleneck, sample: Tensor, uses: Uses, *, owns_input: bool) -> None:
        super().__init__()
        found = [getattr(block, name) for name in ("conv1", "conv2", "conv3") if hasattr(block, name)]
        self.downsample: FusedConv | None = None
        if block.downsample is not None:
            self.downsample = FusedConv(block.downsample[0], sample.shape[1:], uses, relu=False)
        self._in_place = owns_input or self.downsample is not None
        self.convs = nn.ModuleList()
        for conv in found:
            self.convs.append(FusedConv(conv, sample.shape[1:], uses, relu=conv is not found[-1]))
            sample = conv(sample)

    def forward(self, batch: Tensor) -> Tensor:
        """The block's output; `batch` may be overwritten."""
        shortcut = batch if self.downsample is None else self.downsample(batch)
        *inner, last = self.convs
        for conv in inner:
            batch = conv(batch)
        output: Tensor = last.add_to(shortcut, batch, in_place=self._in_place)  # type: ignore[operator]
        return output


def fuse(blocks: nn.Sequential, uses: Uses, dtype: torch.dtype) -> nn.Sequential:
    """The same in fewer passes. `blocks` are a stage's, folded, channels-last and of that dtype; what cannot be fused stays."""
    sample = torch.zeros((1, *uses.row_shape), dtype=dtype)
    if sample.ndim == 4:
        sample = sample.contiguous(memory_format=torch.channels_last)
    fused: list[nn.Module] = []
    modules = [inner for module in blocks for inner in (module if isinstance(module, nn.Sequential) else [module])]
    for module, following in zip(modules, [*modules[1:], None], strict=True):
        made = module
        if isinstance(module, BasicBlock | Bottleneck):
            made = FusedBlock(module, sample, uses, owns_input=bool(fused))
        elif isinstance(module, nn.Conv2d):
            made = FusedConv(module, sample.shape[1:], uses, relu=isinstance(following, nn.ReLU))
        elif isinstance(module, nn.ReLU) and fused and isinstance(fused[-1], FusedConv):
            continue
        fused.append(made)
        sample = module(sample)
    return nn.Sequential(*fused)
