"""The pictures that the leader sends: two that come with scikit-learn, or one of yours."""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional

from models import Preprocessing


def load_pictures(path: Path | None, preprocessing: Preprocessing) -> dict[str, Tensor]:
    """By name, each uint8 [1,3,H,W], resized and cropped as the model wants it. Without a path, a Chinese palace and a flower.

    Raises OSError when the file is no picture that can be read.
    """
    if path is not None:
        return {path.name: prepared(Image.open(path), preprocessing)}
    from sklearn.datasets import load_sample_image  # noqa: PLC0415 - takes seconds, and only the leader needs it

    names = ("china.jpg", "flower.jpg")
    return {name: prepared(Image.fromarray(load_sample_image(name)), preprocessing) for name in names}


def prepared(image: Image.Image, preprocessing: Preprocessing) -> Tensor:
    """uint8 [1,3,H,W], resized and cropped as the model wants it."""
    resized = functional.resize(image.convert("RGB"), [preprocessing.resize_size])
    cropped = functional.center_crop(resized, [preprocessing.crop_size])
    return torch.as_tensor(functional.pil_to_tensor(cropped)).unsqueeze(0)
