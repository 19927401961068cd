"""Answers a photo with a PNG in which each class has a color of its own."""

import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from multiworld_serving import Bundle, InvalidInput, Request, Response, Stage

SIZE = 64
MAX_PIXELS = 50_000_000


def _colors() -> np.ndarray:
    """The colors of Pascal VOC, uint8 [256,3]: bits 0, 3 and 6 of the class are the highest bits of red, and so on."""
    classes = np.arange(256)[:, None]
    channels = np.arange(3)
    bits = [((classes >> (3 * place + channels)) & 1) << (7 - place) for place in range(3)]
    colors: np.ndarray = np.stack(bits).sum(axis=0, dtype=np.uint8)
    return colors


class Decode(Stage):
    """Photos as pixels uint8 [3,SIZE,SIZE]."""

    def __call__(self, requests: Sequence[Request]) -> list[Any]:
        return [{"input": pixels(each.body)} for each in requests]


class Paint(Stage):
    """The most probable class of each pixel as a PNG."""

    def __call__(self, rows: Sequence[dict[str, Any]]) -> list[Any]:
        return [Response(painted(each["out"].argmax(0).numpy().astype(np.uint8)), "image/png") for each in rows]


def pixels(body: bytes) -> np.ndarray:
    """The pixels of a JPEG, PNG or WebP file. Raises InvalidInput."""
    warnings.simplefilter("ignore")
    try:
        with Image.open(io.BytesIO(body), formats=("JPEG", "PNG", "WEBP")) as image:
            if image.width * image.height > MAX_PIXELS:
                raise InvalidInput(f"the image has more than {MAX_PIXELS} pixels")
            resized = np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR))
    except OSError as error:
        raise InvalidInput(f"the body is not an image: {error}") from error
    return resized.transpose(2, 0, 1)


def painted(classes: np.ndarray) -> bytes:
    image = Image.fromarray(classes, mode="P")
    image.putpalette(_colors().tobytes())
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


pipeline = [Decode, Bundle("deeplab.bundle", stages=2), Paint]
