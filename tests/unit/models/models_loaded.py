"""The five models for tests, each loaded once per run."""

from functools import cache

import torch
from torch import Tensor, nn

from multiworld_serving.models.export.torchvision_models import LoadedModel, load_model

IMAGE_SIZE = 64


@cache
def loaded(name: str) -> LoadedModel:
    """Model `name` with random weights, and running statistics that are not BatchNorm's defaults of 0 and 1."""
    model = load_model(name, "random:1", image_size=IMAGE_SIZE)
    generator = torch.Generator().manual_seed(2)
    for module in model.module.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(std=0.1, generator=generator)
            module.running_var.uniform_(0.7, 1.3, generator=generator)
    return model


def images(count: int, size: int = IMAGE_SIZE, seed: int = 3) -> Tensor:
    """uint8 [count,3,size,size]: coarse random patterns that differ on average."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    return nn.functional.interpolate(coarse, size=(size, size)).mul(255).to(torch.uint8)
