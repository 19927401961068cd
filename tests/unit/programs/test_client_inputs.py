"""The client converts a Pillow image as the service converts its file, and rejects inputs that it cannot send."""

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from multiworld_client import InputError
from multiworld_client.inputs import _content, as_array
from multiworld_serving.common.service.predictor import ImageSizes
from multiworld_serving.server.frontend.api.images import image_tensor


def saved(image: Image.Image, orientation: int = 1) -> bytes:
    file, exif = BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    image.save(file, "JPEG" if image.mode == "CMYK" else "PNG", exif=exif)
    return file.getvalue()


COLOURS = Image.fromarray((np.arange(40 * 60 * 3) % 251).astype(np.uint8).reshape(40, 60, 3))
GREY = Image.fromarray(np.linspace(0, 65535, 40 * 60).reshape(40, 60).astype(np.uint16))
FILES = {
    **{f"orientation {number}": saved(COLOURS, number) for number in (1, 3, 6, 8)},
    **{mode: saved(COLOURS.convert(mode)) for mode in ("P", "RGBA", "CMYK")},
    "16 bits": saved(GREY),
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
