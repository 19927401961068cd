"""Image files of digits."""

import io

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image


def pil_image(image: ArrayLike) -> Image.Image:
    """A Pillow image of uint8 [3,H,W]."""
    pixels: NDArray[np.uint8] = np.asarray(image)
    return Image.fromarray(pixels.transpose(1, 2, 0))


def png(image: ArrayLike) -> bytes:
    """uint8 [3,H,W] as PNG."""
    file = io.BytesIO()
    pil_image(image).save(file, "PNG")
    return file.getvalue()
