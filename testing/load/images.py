"""Test images that are generated from a seed."""

import io
import random

from PIL import Image


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
