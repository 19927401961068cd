"""Fused oneDNN convolutions: bias, shortcut addition and ReLU in one pass, with weights in oneDNN's preferred layout.

Inductor generates the same operations for a frozen model on a CPU. Calling them directly needs no compiler. They are private
operations of torch: `fusable` checks whether this torch has them; without them stages run unfused.

oneDNN's preferred layout depends on the number of threads and the batch size: with AVX-512, a seventh of ResNet-50's convolutions prefer
their own layout for one sample on two threads. Weights in another layout are reordered in every call, which makes the whole model 2 to 3
times slower. So the weights are kept in each preferred layout, which for most convolutions is a single one.
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
class Workload:
    """Input shapes and thread counts to optimize for. Others work too, but may be slower.

    Attributes:
        sample_shape: shape of one sample of the input.
        max_batch_size: largest batch size; layouts are chosen for this size and for 1.
        threads: numbers of threads that may compute a batch.
    """

    sample_shape: tuple[int, ...]
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


class _Weight:
    """A convolution's weights in each preferred layout. Not a parameter: such tensors can be neither saved nor moved."""

    def __init__(
        self, conv: nn.Conv2d, window: tuple[Any, ...], sample_shape: Sequence[int], workload: Workload
    ) -> None:
        self._layouts: dict[tuple[int, bool], Tensor] = {}
        """By number of threads, and whether the batch has more than one sample."""
        kept: list[Tensor] = []
        for threads in workload.threads:
            with torch_threads(threads):
                for batch_size in sorted({1, workload.max_batch_size}):
                    packed = torch.ops.mkldnn._reorder_convolution_weight(
                        conv.weight.detach(), *window, (batch_size, *sample_shape)
                    )
                    same = next((other for other in kept if _identical(packed, other)), packed)
                    if same is packed:
                        kept.append(packed)
                    self._layouts[threads, batch_size > 1] = same
        self.num_layouts = len(kept)
        self._otherwise = same

    def wanted_for(self, batch: Tensor) -> Tensor:
        """The weights for this batch size and torch's current number of threads."""
        return self._layouts.get((torch.get_num_threads(), len(batch) > 1), self._otherwise)


def _identical(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors in oneDNN layouts are equal byte for byte."""
    size = torch.ops.mkldnn._nbytes(one)
    if size != torch.ops.mkldnn._nbytes(other):
        return False
    places = (ctypes.c_void_p(torch.ops.mkldnn.data_ptr(tensor)) for tensor in (one, other))
    difference: int = ctypes.CDLL(None).memcmp(*places, ctypes.c_size_t(size))
    return difference == 0


class FusedConv(nn.Module):
    """A convolution with bias and optional ReLU. Channels-last input and output.

    Args:
        sample_shape: [C,H,W] of its input.
        workload: the stage's workload.
    """

    def __init__(self, conv: nn.Conv2d, sample_shape: Sequence[int], workload: Workload, *, relu: bool) -> None:
        super().__init__()
        self._window = (conv.padding, conv.stride, conv.dilation, conv.groups)
        self._then = "relu" if relu else "none"
        self.weight = _Weight(conv, self._window, sample_shape, workload)
        self._bias = None if conv.bias is None else conv.bias.detach()

    def forward(self, batch: Tensor) -> Tensor:
        """Convolution, bias, and ReLU."""
        output: Tensor = torch.ops.mkldnn._convolution_pointwise(
            batch, self.weight.wanted_for(batch), self._bias, *self._window, self._then, [], ""
        )
        return output

    def add_to(self, shortcut: Tensor, batch: Tensor, *, in_place: bool) -> Tensor:
        """ReLU of convolution plus `shortcut`, which is overwritten if `in_place`."""
        operations = torch.ops.mkldnn
        add = operations._convolution_pointwise_.binary if in_place else operations._convolution_pointwise.binary
        settings: tuple[Any, ...] = (*self._window, "add", 1.0, "relu", [], "")
        first = (shortcut, batch) if in_place else (batch, shortcut)
        output: Tensor = add(*first, self.weight.wanted_for(batch), self._bias, *settings)
        return output


class FusedBlock(nn.Module):
    """A residual block of torchvision's ResNets, with batch normalisation already folded.

    Args:
        example: an input batch, channels-last; only the shape of its samples is used.
        workload: the stage's workload.
        owns_input: whether the input may be overwritten.
    """

    def __init__(
        self, block: BasicBlock | Bottleneck, example: Tensor, workload: Workload, *, owns_input: bool
    ) -> None:
        super().__init__()
        found = [getattr(block, name) for name in ("conv1", "conv2", "conv3") if hasattr(block, name)]
        self.downsample: FusedConv | None = None
        if block.downsample is not None:
            self.downsample = FusedConv(block.downsample[0], example.shape[1:], workload, relu=False)
        self._in_place = owns_input or self.downsample is not None
        self.convs = nn.ModuleList()
        for conv in found:
            self.convs.append(FusedConv(conv, example.shape[1:], workload, relu=conv is not found[-1]))
            example = conv(example)

    def forward(self, batch: Tensor) -> Tensor:
        """The block's output; `batch` may be overwritten."""
        shortcut = batch if self.downsample is None else self.downsample(batch)
        *inner, last = self.convs
        for conv in inner:
            batch = conv(batch)
        output: Tensor = last.add_to(shortcut, batch, in_place=self._in_place)  # type: ignore[operator]
        return output


def fuse(blocks: nn.Sequential, workload: Workload, dtype: torch.dtype) -> nn.Sequential:
    """Fuse a stage's blocks, which must be folded, channels-last and of `dtype`. Modules that cannot be fused are kept."""
    example = torch.zeros((1, *workload.sample_shape), dtype=dtype)
    if example.ndim == 4:
        example = example.contiguous(memory_format=torch.channels_last)
    fused: list[nn.Module] = []
    modules = [inner for module in blocks for inner in (module if isinstance(module, nn.Sequential) else [module])]
    for module, following in zip(modules, [*modules[1:], None], strict=True):
        made = module
        if isinstance(module, BasicBlock | Bottleneck):
            made = FusedBlock(module, example, workload, owns_input=bool(fused))
        elif isinstance(module, nn.Conv2d):
            made = FusedConv(module, example.shape[1:], workload, relu=isinstance(following, nn.ReLU))
        elif isinstance(module, nn.ReLU) and fused and isinstance(fused[-1], FusedConv):
            continue
        fused.append(made)
        example = module(example)
    return nn.Sequential(*fused)
