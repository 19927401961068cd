"""Test images: generated from a seed, or read from a file."""

import io
import random
from pathlib import Path

from PIL import Image

from multiworld_serving.common.config import UserError

_TYPES = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}


def photo(seed: int = 0, width: int = 500, height: int = 375) -> bytes:
    """Return a JPEG with random structure. The same seed gives the same bytes."""
    generator = random.Random(seed)
    small = (max(1, width // 25), max(1, height // 25))
    noise = Image.frombytes("RGB", small, generator.randbytes(3 * small[0] * small[1]))
    tint = Image.new("RGB", small, tuple(generator.randrange(256) for _ in range(3)))
    image, file = Image.blend(noise, tint, 0.5).resize((width, height), Image.Resampling.BICUBIC), io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return file.getvalue()


def photos(count: int, seed: int = 0) -> list[tuple[bytes, str]]:
    """Return `count` different images with their content types."""
    return [(photo(seed + number), "image/jpeg") for number in range(count)]


def image_file(path: Path) -> tuple[bytes, str]:
    """Read an image file; returns it with its content type. Raises UserError if the service does not support it."""
    try:
        body = path.read_bytes()
        with Image.open(io.BytesIO(body)) as image:
            kind = image.format or ""
    except (OSError, ValueError) as error:
        raise UserError(f"--image {path}: cannot be read as an image: {error}") from error
    if kind not in _TYPES:
        raise UserError(f"--image {path}: is {kind}, expected one of {', '.join(_TYPES)}")
    return body, _TYPES[kind]
