"""Preprocessing of images.

The frontend resizes and crops to uint8. Normalisation is part of the first stage (`Normalize`), so that uint8 is transferred.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multiworld_serving.models.errors import PreprocessingError

MAX_IMAGE_SIZE = 4096
"""Largest side in pixels of a model's input. It bounds the memory of a batch."""


def check_image_size(size: int, field: str = "image_size") -> int:
    """Return `size` if it is a valid side in pixels. Raises PreprocessingError."""
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_IMAGE_SIZE:
        raise PreprocessingError(f"{field} is {size!r}; expected a whole number from 1 to {MAX_IMAGE_SIZE} pixels")
    return size


def check_channels(values: Sequence[float], field: str, *, positive: bool = False) -> tuple[float, float, float]:
    """`values` as three floats, one per channel.

    Raises:
        PreprocessingError: not three finite numbers, or not above 0 if `positive`.
    """
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != 3:
        raise PreprocessingError(f"{field} is {values!r}; expected three numbers, one per channel (R, G, B)")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise PreprocessingError(f"{field} contains {value!r}; expected three finite numbers")
        if positive and value <= 0:
            raise PreprocessingError(f"{field} contains {value!r}; expected three numbers above 0")
    red, green, blue = (float(value) for value in values)
    return red, green, blue


@dataclass(frozen=True)
class Preprocessing:
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
        check_image_size(self.resize_size, "resize_size")
        check_image_size(self.crop_size, "crop_size")
        if self.resize_size < self.crop_size:
            raise PreprocessingError(
                f"resize_size {self.resize_size} is smaller than the crop of {self.crop_size} pixels; "
                "expected at least the crop (image_size)"
            )
        object.__setattr__(self, "mean", check_channels(self.mean, "mean"))
        object.__setattr__(self, "std", check_channels(self.std, "std", positive=True))

    @classmethod
    def from_weights(cls, weights: Any) -> "Preprocessing":
        """Preprocessing in the metadata of torchvision's published weights (a member of a `WeightsEnum`)."""
        preset = weights.transforms()
        return cls(preset.resize_size[0], preset.crop_size[0], tuple(preset.mean), tuple(preset.std))

    def with_overrides(
        self,
        *,
        image_size: int | None = None,
        resize_size: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> "Preprocessing":
        """A copy with the given values. `image_size` sets the crop, and the resize too unless `resize_size` is given.

        Raises:
            PreprocessingError: a value is out of range.
        """
        crop = self.crop_size if image_size is None else check_image_size(image_size)
        default_resize = self.resize_size if image_size is None else crop
        return Preprocessing(
            resize_size=default_resize if resize_size is None else resize_size,
            crop_size=crop,
            mean=self.mean if mean is None else check_channels(mean, "mean"),
            std=self.std if std is None else check_channels(std, "std", positive=True),
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
        check_images(images)
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


def check_images(images: Tensor) -> None:
    """Raise PreprocessingError unless they are uint8 [B,3,H,W]."""
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise PreprocessingError(
            f"images are {images.dtype} {list(images.shape)}; expected torch.uint8 [B, 3, H, W], not yet normalised"
        )
