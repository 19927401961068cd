"""The five ResNets: names, blocks, and construction.

A *block* is the smallest unit of a partition: the stem (conv1, bn1, relu, maxpool), each residual block ("layer1.0", ...), and the head
(avgpool, flatten, fc). One tensor flows between consecutive blocks, so each stage boundary costs one transfer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torchvision.models import resnet

from multiworld_serving.models.errors import ModelError

_STEM = ("conv1", "bn1", "relu", "maxpool")
_LAYER_CHANNELS = (64, 128, 256, 512)
_EXPANSION = {"basic": 1, "bottleneck": 4}


@dataclass(frozen=True)
class Architecture:
    """One of torchvision's ResNets, without weights."""

    name: str
    builder: Callable[..., Any]
    weights_enum: Any
    """torchvision's enum of published weights."""
    kind: str
    """"basic" or "bottleneck": the residual block."""
    layers: tuple[int, int, int, int]
    """Residual blocks in layer1 to layer4."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks in data-flow order."""
        residual = (f"layer{i}.{j}" for i, count in enumerate(self.layers, start=1) for j in range(count))
        return ("stem", *residual, "head")

    def output_shape(self, block: int, image_size: int, num_classes: int) -> tuple[int, ...]:
        """Output shape of block number `block` without the batch dimension, for square images."""
        name = self.blocks[block]
        if name == "head":
            return (num_classes,)
        # Every stride-2 operation of a ResNet (7x7 pad 3, 3x3 pad 1, 1x1 pad 0) maps h to ceil(h / 2). The stem has
        # two; layer2, layer3 and layer4 have one each.
        if name == "stem":
            channels, halvings = 64, 2
        else:
            layer = int(name[len("layer")])
            channels, halvings = _LAYER_CHANNELS[layer - 1] * _EXPANSION[self.kind], layer + 1
        side = -(-image_size // 2**halvings)
        return (channels, side, side)


ARCHITECTURES: dict[str, Architecture] = {
    a.name: a
    for a in (
        Architecture("resnet18", resnet.resnet18, resnet.ResNet18_Weights, "basic", (2, 2, 2, 2)),
        Architecture("resnet34", resnet.resnet34, resnet.ResNet34_Weights, "basic", (3, 4, 6, 3)),
        Architecture("resnet50", resnet.resnet50, resnet.ResNet50_Weights, "bottleneck", (3, 4, 6, 3)),
        Architecture("resnet101", resnet.resnet101, resnet.ResNet101_Weights, "bottleneck", (3, 4, 23, 3)),
        Architecture("resnet152", resnet.resnet152, resnet.ResNet152_Weights, "bottleneck", (3, 8, 36, 3)),
    )
}
MODEL_NAMES: tuple[str, ...] = tuple(ARCHITECTURES)


def architecture(name: str) -> Architecture:
    """The architecture with this name. Raises ModelError if it is unknown."""
    try:
        return ARCHITECTURES[name]
    except (KeyError, TypeError):
        raise ModelError(f"unknown model {name!r}; expected one of {', '.join(MODEL_NAMES)}") from None


def block_names(name: str) -> tuple[str, ...]:
    """Blocks of a model: "stem", "layer1.0", ..., "head". Raises ModelError for an unknown model."""
    return architecture(name).blocks


@lru_cache(maxsize=16)
def meta_model(name: str, num_classes: int) -> nn.Module:
    """The whole model on the meta device: names, shapes and dtypes without memory. In eval mode, without gradients.

    Cached (building a ResNet-152 takes 0.3 s) and shared: copy it before changing it.
    """
    # Not inference tensors, even if first called in inference mode: weights are loaded into copies later.
    with torch.inference_mode(False), torch.device("meta"):
        model = architecture(name).builder(weights=None, num_classes=num_classes)
    assert isinstance(model, nn.Module)
    return model.eval().requires_grad_(False)


def block_modules(model: nn.Module, block: str) -> list[tuple[str, nn.Module]]:
    """The modules of one block with torchvision's names, in data-flow order. They are not copied."""
    if block == "stem":
        return [(name, model.get_submodule(name)) for name in _STEM]
    if block == "head":
        # torchvision calls torch.flatten(x, 1) here instead of a module.
        return [
            ("avgpool", model.get_submodule("avgpool")),
            ("flatten", nn.Flatten(1)),
            ("fc", model.get_submodule("fc")),
        ]
    return [(block, model.get_submodule(block))]
