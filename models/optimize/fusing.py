"""Convolutions that add, clip and write once: bias, shortcut and ReLU in the same pass, weights laid out once as oneDNN wants them.

These are the operations that inductor makes of a frozen model on a CPU. Called directly, they need no compiler and no time
to compile. torch offers them to its own compiler: `fusable` asks whether this torch has them, and whoever has not is served
as before.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck

_NEEDED = ("_convolution_pointwise", "_convolution_pointwise_", "_reorder_convolution_weight")


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


class FusedConv(nn.Module):
    """A convolution with a bias, and a ReLU behind it if wanted. Channels-last in and out.

    Args:
        input_shape: [B,C,H,W] for which the layout of the weights is chosen; others work, and may cost a little more.
    """

    def __init__(self, conv: nn.Conv2d, input_shape: tuple[int, ...], *, relu: bool) -> None:
        super().__init__()
        self._window = (conv.padding, conv.stride, conv.dilation, conv.groups)
        self._then = "relu" if relu else "none"
        # No parameters: a tensor in oneDNN's own layout can neither be saved nor moved.
        self._weight: Tensor = torch.ops.mkldnn._reorder_convolution_weight(
            conv.weight.detach(), *self._window, input_shape
        )
        self._bias = None if conv.bias is None else conv.bias.detach()

    def forward(self, batch: Tensor) -> Tensor:
        """Convolution, bias, and ReLU."""
        output: Tensor = torch.ops.mkldnn._convolution_pointwise(
            batch, self._weight, self._bias, *self._window, self._then, [], ""
        )
        return output

    def add_to(self, shortcut: Tensor, batch: Tensor, *, in_place: bool) -> Tensor:
        """ReLU of the sum of the convolution and `shortcut`, which is overwritten if `in_place`."""
        operations = torch.ops.mkldnn
        add = operations._convolution_pointwise_.binary if in_place else operations._convolution_pointwise.binary
        settings: tuple[Any, ...] = (*self._window, "add", 1.0, "relu", [], "")
        first = (shortcut, batch) if in_place else (batch, shortcut)
        output: Tensor = add(*first, self._weight, self._bias, *settings)
        return output


class FusedBlock(nn.Module):
    """A residual block of torchvision's ResNets, its batch normalisation folded already.

    Args:
        sample: a batch of input, channels-last; only its shape counts.
        owns_input: whether the input may be overwritten when nothing else needs it any more.
    """

    def __init__(self, block: BasicBlock | Bottleneck, sample: Tensor, *, owns_input: bool) -> None:
        super().__init__()
        found = [getattr(block, name) for name in ("conv1", "conv2", "conv3") if hasattr(block, name)]
        self.downsample: FusedConv | None = None
        if block.downsample is not None:
            self.downsample = FusedConv(block.downsample[0], tuple(sample.shape), relu=False)
        self._in_place = owns_input or self.downsample is not None
        self.convs = nn.ModuleList()
        for conv in found:
            self.convs.append(FusedConv(conv, tuple(sample.shape), relu=conv is not found[-1]))
            sample = conv(sample)

    def forward(self, batch: Tensor) -> Tensor:
        """The block's output; `batch` may be overwritten."""
        shortcut = batch if self.downsample is None else self.downsample(batch)
        *inner, last = self.convs
        for conv in inner:
            batch = conv(batch)
        output: Tensor = last.add_to(shortcut, batch, in_place=self._in_place)  # type: ignore[operator]
        return output


def fuse(blocks: nn.Sequential, sample: Tensor) -> nn.Sequential:
    """The same in fewer passes. `blocks` are a stage's, folded and channels-last; what cannot be fused stays.

    Args:
        sample: a batch of their input, channels-last.
    """
    fused: list[nn.Module] = []
    modules = [inner for module in blocks for inner in (module if isinstance(module, nn.Sequential) else [module])]
    for module, following in zip(modules, [*modules[1:], None], strict=True):
        made = module
        if isinstance(module, BasicBlock | Bottleneck):
            made = FusedBlock(module, sample, owns_input=bool(fused))
        elif isinstance(module, nn.Conv2d):
            made = FusedConv(module, tuple(sample.shape), relu=isinstance(following, nn.ReLU))
        elif isinstance(module, nn.ReLU) and fused and isinstance(fused[-1], FusedConv):
            continue
        fused.append(made)
        sample = module(sample)
    return nn.Sequential(*fused)
