"""Images to ask about: made from a seed, or a person's own."""

import io
import random
from pathlib import Path

from PIL import Image

from config import UserError

_TYPES = {"JPEG": "image/jpeg", "PNG": "image/png", "WEBP": "image/webp"}


def photo(seed: int = 0, width: int = 500, height: int = 375) -> bytes:
    """A JPEG with some structure; the same bytes for the same seed, and two seeds look nothing alike."""
    generator = random.Random(seed)
    small = (max(1, width // 25), max(1, height // 25))
    noise = Image.frombytes("RGB", small, generator.randbytes(3 * small[0] * small[1]))
    tint = Image.new("RGB", small, tuple(generator.randrange(256) for _ in range(3)))
    picture, file = Image.blend(noise, tint, 0.5).resize((width, height), Image.Resampling.BICUBIC), io.BytesIO()
    picture.save(file, "JPEG", quality=90)
    return file.getvalue()


def photos(count: int, seed: int = 0) -> list[tuple[bytes, str]]:
    """So many different images, each with its content type."""
    return [(photo(seed + number), "image/jpeg") for number in range(count)]


def image_file(path: Path) -> tuple[bytes, str]:
    """A person's own image, with its content type. Raises UserError when it is none that the service takes."""
    try:
        body = path.read_bytes()
        with Image.open(io.BytesIO(body)) as image:
            kind = image.format or ""
    except (OSError, ValueError) as error:
        raise UserError(f"--image {path}: cannot be read as an image: {error}") from error
    if kind not in _TYPES:
        raise UserError(f"--image {path}: is {kind}, expected one of {', '.join(_TYPES)}")
    return body, _TYPES[kind]
