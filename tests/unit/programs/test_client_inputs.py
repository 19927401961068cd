"""The client converts a Pillow image as the service converts its file, and rejects inputs that it cannot send."""

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from multiworld_client import InputError
from multiworld_client.inputs import _content, as_array
from multiworld_serving.server.api.images import image_tensor
from multiworld_serving.server.predictor import ImageSizes


def saved(image: Image.Image, form: str, **settings: object) -> bytes:
    file = BytesIO()
    image.save(file, form, **settings)
    return file.getvalue()


def rotated(orientation: int) -> bytes:
    image = Image.fromarray((np.arange(40 * 60 * 3) % 251).astype(np.uint8).reshape(40, 60, 3))
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(image, "PNG", exif=exif)


def grey(dtype: str) -> bytes:
    values = np.linspace(0, 65535, 40 * 60).reshape(40, 60)
    return saved(Image.fromarray(values.astype(dtype)), "PNG")


FILES = {
    **{f"orientation {number}": rotated(number) for number in (1, 3, 6, 8)},
    "16 bits": grey("uint16"),
    "palette": saved(Image.open(BytesIO(rotated(1))).convert("P"), "PNG"),
    "alpha": saved(Image.open(BytesIO(rotated(1))).convert("RGBA"), "PNG"),
    "CMYK": saved(Image.open(BytesIO(rotated(1))).convert("CMYK"), "JPEG"),
}


@pytest.mark.parametrize("kind", FILES)
def test_pillow_image_is_converted_like_its_file(kind: str) -> None:
    file = FILES[kind]
    expected, sent = (
        image_tensor(data, ImageSizes(36, 32), 10_000) for data in (file, _content(Image.open(BytesIO(file))))
    )
    difference = (expected.int() - sent.int()).abs()
    assert int(difference.max()) <= 1, "of 256 levels"


def test_tensor_raises_input_error_when_numpy_has_no_such_dtype() -> None:
    with pytest.raises(InputError, match="bfloat16"):
        as_array(torch.zeros(1, 3, 8, 8, dtype=torch.bfloat16))
