"""Preprocessing of images.

The frontend resizes and crops to uint8. Normalisation is part of the first stage (`Normalize`), so that uint8 is transferred.
"""

import math
from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor, nn

from multiworld_serving.models.errors import PreprocessingError

MAX_IMAGE_SIZE = 4096
"""Largest side in pixels of a model's input. It bounds the memory of a batch."""


class Preprocessing(Struct, frozen=True, forbid_unknown_fields=True):
    """Preprocessing from a decoded image to the model's input, as in torchvision's `ImageClassification`.

    Resize the shorter side to `resize_size`, crop the centre `crop_size` square (both in pixels), scale to 0..1,
    subtract `mean`, divide by `std` (R, G, B, of images in 0..1).

    Raises:
        PreprocessingError: a field is out of range.
    """

    resize_size: int
    crop_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        if not 1 <= self.crop_size <= self.resize_size <= MAX_IMAGE_SIZE:
            raise PreprocessingError(
                f"images are resized to {self.resize_size} and cropped to {self.crop_size} pixels; "
                f"expected a crop from 1 pixel to the resized side, and this side at most {MAX_IMAGE_SIZE}"
            )
        if not all(map(math.isfinite, (*self.mean, *self.std))) or min(self.std) <= 0:
            raise PreprocessingError(
                f"mean {self.mean} or std {self.std} is invalid; expected finite numbers, std above 0"
            )


class Normalize(nn.Module):
    """uint8 [B,3,H,W] in 0..255 to float32 (x / 255 - mean) / std, with the same operations as torchvision's transform.

    Has no saved state: `Preprocessing` has mean and std.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Returns a new float32 tensor of the same shape; `images` is not changed.

        Raises:
            PreprocessingError: not uint8, or not [B,3,H,W]. Floats would silently be divided by 255 again.
        """
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
            raise PreprocessingError(
                f"images are {images.dtype} {list(images.shape)}; expected torch.uint8 [B, 3, H, W], not yet normalised"
            )
        return images.to(torch.float32).div_(255).sub_(self.mean).div_(self.std)


class ImageModel(nn.Module):
    """Normalises uint8 images [B,3,H,W], applies a model, and turns its logits into probabilities if it classifies."""

    def __init__(self, model: nn.Module, image: Preprocessing | None, *, probabilities: bool) -> None:
        super().__init__()
        self.model = model
        self.normalize = Normalize(image.mean, image.std) if image is not None else nn.Identity()
        self.softmax = nn.Softmax(dim=1) if probabilities else nn.Identity()
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """The model's output.

        Raises:
            PreprocessingError: not uint8 [B,3,H,W], if it normalises.
        """
        output: Tensor = self.softmax(self.model(self.normalize(images)))
        return output
