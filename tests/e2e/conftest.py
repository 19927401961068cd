"""Images of digits, and what the model of `service` answers to them."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from examples.digits.train import IMAGE_SIZE
from multiworld_serving.models.export.torchvision_models import load_model


@pytest.fixture(scope="session")
def pixels(digits: Path) -> Tensor:
    """uint8 [8,3,S,S]."""
    return safetensors.torch.load_file(digits / "images.safetensors")["images"][:8]


@pytest.fixture(scope="session")
def expected(digits: Path, pixels: Tensor) -> Tensor:
    """float32 [8,10]."""
    model = load_model("resnet18", str(digits / "digits.safetensors"), image_size=IMAGE_SIZE)
    with torch.inference_mode():
        found: Tensor = model.classifier()(pixels)
    return found
