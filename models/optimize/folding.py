"""Folds batch normalisation and input scaling into convolution weights, and uses channels-last layout."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from multiworld_serving.models.errors import PreprocessingError
from multiworld_serving.models.optimize.fusing import Workload, fuse
from multiworld_serving.models.preprocessing import Normalize
from multiworld_serving.models.stages import Stage


class SubtractMean(nn.Module):
    """Subtract the mean of each channel: uint8 [B,3,H,W] to channels-last float32, in one pass.

    The rest of the normalisation (division by 255 and by std) is folded into the weights of the next convolution. The mean cannot be
    folded: the convolution pads with zeros, which represent the mean colour, not black, so results at the borders would differ.
    """

    offset: Tensor

    def __init__(self, normalize: Normalize) -> None:
        super().__init__()
        self.register_buffer("offset", normalize.mean * 255, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Returns a new tensor; `images` is not changed.

        Raises:
            PreprocessingError: not uint8, or not [B,3,H,W].
        """
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            raise PreprocessingError(
                f"images are {images.dtype} {list(images.shape)}; expected torch.uint8 [B, 3, H, W], not yet normalised"
            )
        return torch.sub(images.contiguous(memory_format=torch.channels_last), self.offset)


class FoldedStage(nn.Module):
    """A stage with folded weights, in channels-last layout and any precision inside.

    Same interface as `Stage`: uint8 or float32 in, contiguous float32 out.

    Args:
        stage: not changed; the weights are copied.
        dtype: of weights and activations inside.
        fuse_for: the workload to fuse convolutions for (see `fusing`; check `fusable` first). None does not fuse.
    """

    def __init__(self, stage: Stage, dtype: torch.dtype = torch.float32, *, fuse_for: Workload | None = None) -> None:
        super().__init__()
        self.spec = stage.spec
        self._dtype = dtype
        body = copy.deepcopy(stage)
        fold_batch_norm(body)
        self.subtract_mean = (
            _fold_normalisation(body, exact_scale=dtype == torch.float16) if stage.spec.is_first else None
        )
        blocks = [
            module
            for name, module in body.named_children()
            if name not in ("normalize", "softmax") and not isinstance(module, nn.Identity)
        ]
        self.blocks = nn.Sequential(*blocks).to(dtype).to(memory_format=torch.channels_last)
        self.eval().requires_grad_(False)
        if fuse_for is not None:
            with torch.inference_mode():
                self.blocks = fuse(self.blocks, fuse_for, dtype)

    def forward(self, batch: Tensor) -> Tensor:
        """See `Stage`.

        Raises:
            PreprocessingError: the input of the first stage is not uint8 [B,3,H,W].
        """
        if self.subtract_mean is not None:
            batch = self.subtract_mean(batch)
        layout = torch.channels_last if batch.ndim == 4 else torch.contiguous_format
        output: Tensor = self.blocks(batch.to(dtype=self._dtype, memory_format=layout)).to(torch.float32)
        if self.spec.is_last:
            output = output.softmax(dim=1)
        return output.contiguous()


def fold_batch_norm(module: nn.Module) -> None:
    """Fold every batch normalisation that follows a convolution into its weights, in place.

    torchvision's ResNets name such pairs conv1 and bn1, conv2 and bn2, and so on, or put them next to each other in a Sequential
    (the downsampling shortcut).
    """
    for parent in list(module.modules()):
        children = dict(parent.named_children())
        following = dict(zip(children, list(children)[1:], strict=False)) if isinstance(parent, nn.Sequential) else {}
        for name, conv in children.items():
            norm_name = name.replace("conv", "bn") if name.startswith("conv") else following.get(name, "")
            norm = children.get(norm_name)
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(parent, name, fuse_conv_bn_eval(conv, norm))
                setattr(parent, norm_name, nn.Identity())


def _fold_normalisation(stage: nn.Module, *, exact_scale: bool) -> nn.Module:
    """Fold scaling into the first convolution. Returns the module that does the remaining normalisation."""
    normalize, conv = stage.get_submodule("normalize"), stage.get_submodule("conv1")
    assert isinstance(normalize, Normalize)
    assert isinstance(conv, nn.Conv2d)
    if exact_scale:  # weights divided by 255 would be subnormal in float16
        return normalize
    with torch.no_grad():
        conv.weight.div_(normalize.std.view(1, 3, 1, 1) * 255)
    return SubtractMean(normalize)
