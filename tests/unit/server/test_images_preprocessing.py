"""Preprocessing of images: upright, RGB, scaled and cropped like torchvision."""

import io
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms._presets import ImageClassification

from multiworld_serving.common.service.errors import ImageError, ImageTooLargeError
from multiworld_serving.common.service.predictor import ImageSizes
from multiworld_serving.server.frontend.api.images import MIN_SIDE, image_tensor
from tests.unit.server.frontend_app import image_bytes


def decode(data: bytes, *, resize_size: int = 32, crop_size: int = 32, max_pixels: int = 4_000_000) -> Tensor:
    return image_tensor(data, ImageSizes(resize_size, crop_size), max_pixels)


def picture(width: int, height: int) -> Image.Image:
    """Smooth shapes with noise."""
    random = np.random.default_rng(width * height)
    coarse = Image.fromarray(random.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8))
    noise = random.integers(-40, 41, (height, width, 3))
    return Image.fromarray((np.asarray(coarse.resize((width, height))) + noise).clip(0, 255).astype(np.uint8))


def file_of(image: Image.Image, file_format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def torchvision_pixels(image: Image.Image, resize_size: int, crop_size: int) -> Tensor:
    transform = ImageClassification(crop_size=crop_size, resize_size=resize_size, mean=(0.0,) * 3, std=(1.0,) * 3)
    pixels: Tensor = transform(image)
    return (pixels * 255).round()


@pytest.mark.parametrize(("resize_size", "crop_size"), [(256, 224), (232, 224), (32, 32), (8, 7)])
@pytest.mark.parametrize(
    "size", [(500, 375), (375, 500), (256, 256), (257, 255), (8, 8), (801, 200), (17, 300), (700, 9)], ids=str
)
def test_scaling_and_cropping_equal_torchvision(size: tuple[int, int], resize_size: int, crop_size: int) -> None:
    image = picture(*size)
    found = decode(file_of(image), resize_size=resize_size, crop_size=crop_size)
    assert (found - torchvision_pixels(image, resize_size, crop_size)).abs().max() <= 1


@pytest.mark.parametrize("size", [(32, 32), (40, 40), (33, 64), (64, 50), (20, 40)], ids=str)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_tiny_images_equal_torchvision(size: tuple[int, int], mode: str) -> None:
    data = file_of(picture(*size).convert(mode), "JPEG")
    expected = torchvision_pixels(Image.open(io.BytesIO(data)).convert("RGB"), 32, 32)
    off = (decode(data).float() - expected).abs()
    most = 0 if size == (32, 32) else 2  # decoding is exact, and scaling is not
    assert off.max() <= most
    assert off.mean() <= 0.1


@pytest.mark.parametrize("size", [(500, 375), (511, 300), (256, 256), (257, 511), (40, 33), (801, 200)], ids=str)
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}], ids=str)
def test_small_jpeg_is_within_one_gray_level_of_torchvision(size: tuple[int, int], options: dict[str, object]) -> None:
    data = file_of(picture(*size), "JPEG", **options)
    found = decode(data, resize_size=256, crop_size=224)
    assert (found - torchvision_pixels(Image.open(io.BytesIO(data)), 256, 224)).abs().max() <= 1


@pytest.mark.parametrize(
    ("size", "mode"), [((1021, 1537), "RGB"), ((2049, 1050), "L"), ((1030, 3127), "RGB"), ((1100, 1050), "CMYK")]
)
@pytest.mark.parametrize("orientation", [1, 6, 7])
def test_large_jpeg_is_decoded_at_reduced_size_with_similar_pixels(
    size: tuple[int, int], mode: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(picture(*size).convert(mode), "JPEG", quality=90, exif=exif)
    exact = torchvision_pixels(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"), 256, 224)
    off = (decode(data, resize_size=256, crop_size=224, max_pixels=10**8) - exact).abs()
    assert off.mean() <= 2.5  # from noise in every pixel, stronger than any camera's
    assert off.max() <= 25.0
    assert (exact[:, 1:] - exact[:, :-1]).abs().mean() > 1.0  # a shift by one pixel would exceed this


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_image_is_upright_for_every_exif_orientation(orientation: int, file_format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(picture(44, 40), file_format, exif=exif)
    upright = file_of(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert (decode(data, resize_size=39).int() - decode(upright, resize_size=39).int()).abs().max() <= 1


MODES = {
    "grey": (image_bytes(100, mode="L"), (100, 100, 100)),
    "bilevel": (image_bytes(1, mode="1"), (255, 255, 255)),
    "grey with alpha": (image_bytes((100, 50), mode="LA"), (100, 100, 100)),
    "RGBA drops alpha": (image_bytes((10, 20, 30, 0), mode="RGBA"), (10, 20, 30)),
    "grey of 16 bits": (image_bytes(0x8040, mode="I;16"), (0x80, 0x80, 0x80)),
    "RGB with a transparent colour": (image_bytes((10, 20, 30), transparency=(10, 20, 30)), (10, 20, 30)),
    "grey with a transparent level": (image_bytes(100, mode="L", transparency=100), (100, 100, 100)),
    "CMYK JPEG": (image_bytes((255, 0, 0, 0), mode="CMYK", file_format="JPEG", quality=95), (0, 255, 255)),
    "grey JPEG": (image_bytes(100, mode="L", file_format="JPEG"), (100, 100, 100)),
    "WebP with alpha": (image_bytes((10, 20, 30, 255), mode="RGBA", file_format="WEBP", lossless=True), (10, 20, 30)),
}


@pytest.mark.parametrize("name", MODES)
def test_every_mode_becomes_rgb(name: str) -> None:
    data, colour = MODES[name]
    tensor = decode(data, resize_size=20, crop_size=16).int()
    assert (tensor - torch.tensor(colour).view(3, 1, 1)).abs().max() <= 2


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (MIN_SIDE - 1, 100), (100, MIN_SIDE - 1)])
def test_image_with_a_short_side_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match="at least 8x8"):
        decode(image_bytes(size=size))


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
def test_image_with_too_many_pixels_is_refused_before_decoding(file_format: str) -> None:
    data = image_bytes(size=(3000, 3000), file_format=file_format)
    tracemalloc.start()
    try:
        with pytest.raises(ImageTooLargeError, match="3000x3000 = 9000000 pixels, the limit is 4000000"):
            decode(data)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_long_thin_image_needs_no_more_memory_than_its_crop() -> None:
    tensor = decode(image_bytes("green", size=(8, 60_000)), resize_size=256, crop_size=224)
    assert tensor[1].min() == tensor[1].max() == 128
