"""The images that the leader sends: two from scikit-learn, or one from a file."""

from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional

from multiworld_serving.models.preprocessing import Preprocessing


def load_images(path: Path | None, preprocessing: Preprocessing) -> dict[str, Tensor]:
    """Return images by name, each uint8 [1,3,H,W], resized and cropped for the model. Without a path: a Chinese palace and a flower.

    Raises OSError when the file cannot be read as an image.
    """
    if path is not None:
        return {path.name: prepare(Image.open(path), preprocessing)}
    from sklearn.datasets import load_sample_image  # noqa: PLC0415 - this import takes seconds, and only the leader needs it

    names = ("china.jpg", "flower.jpg")
    return {name: prepare(Image.fromarray(load_sample_image(name)), preprocessing) for name in names}


def prepare(image: Image.Image, preprocessing: Preprocessing) -> Tensor:
    """Return the image as uint8 [1,3,H,W], resized and cropped for the model."""
    resized = functional.resize(image.convert("RGB"), [preprocessing.resize_size])
    cropped = functional.center_crop(resized, [preprocessing.crop_size])
    return torch.as_tensor(functional.pil_to_tensor(cropped)).unsqueeze(0)
