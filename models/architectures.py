"""The ResNets of torchvision: names, published weights, and construction without weights."""

from functools import lru_cache
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck

from multiworld_serving.models.errors import ModelError

MODEL_NAMES: tuple[str, ...] = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152"),
    *("resnext50_32x4d", "resnext101_32x8d", "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"),
)


def published_weights(name: str) -> Any:
    """torchvision's enum of the published weights of a model. Raises ModelError for an unknown model."""
    if name not in MODEL_NAMES:
        raise ModelError(f"unknown model {name!r}; expected one of {', '.join(MODEL_NAMES)}")
    return torchvision.models.get_model_weights(name)


@lru_cache(maxsize=16)
def meta_model(name: str, num_classes: int) -> nn.Module:
    """The whole model on the meta device: names, shapes and dtypes without memory. In eval mode, without gradients.

    Cached (building a ResNet-152 takes 0.3 s) and shared: copy it before changing it.
    """
    # Not inference tensors, even if first called in inference mode: weights are loaded into copies later.
    with torch.inference_mode(False), torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None, num_classes=num_classes)
    assert isinstance(model, nn.Module)
    return model.eval().requires_grad_(False)


def residual_blocks(model: nn.Module) -> list[BasicBlock | Bottleneck]:
    """The residual blocks of a ResNet."""
    return [module for module in model.modules() if isinstance(module, BasicBlock | Bottleneck)]


def count_blocks(name: str) -> int:
    """Number of blocks between which a model can be cut: the residual blocks, and the layers before and after them."""
    return len(residual_blocks(meta_model(name, 1000))) + 2
