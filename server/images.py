"""From the bytes of a JPEG, PNG or WebP file to the uint8 tensor that the first stage takes.

Exactly: scaling and cropping give what torchvision's `ImageClassification` transform gives before it normalises (within one
grey level), so that accuracy over HTTP is accuracy in the notebook. Fast: a JPEG that is much larger than what is wanted is
decoded at a half, a quarter or an eighth of its size, and only what the crop leaves is scaled; smaller ones differ by one grey
level at the most, larger photographs by less than one on average. Neither time nor memory depends on the image's aspect ratio.

All of it is synchronous and holds no state: `server.decode_pool` runs it off the event loop.
"""

from __future__ import annotations

import math
from io import BytesIO

import torch
from PIL import ExifTags, Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile
from torch import Tensor

from server.errors import ImageError, ImageTooLargeError

MIN_SIDE = 8
"""Pixels. Anything smaller is a tracking pixel or a mistake: no class can be seen in it. Digits are 8x8."""

_MAX_JPEG_SCANS = 200
"""A progressive JPEG has about ten. Each scan walks the whole image: thousands of them take minutes to decode."""
_MAX_JPEG_SEGMENTS = 1000
"""Before the first scan, with at most this much junk before each. Pillow walks both byte by byte, holding the GIL."""
_MAX_JPEG_JUNK_BYTES = 64
_JPEG_SEGMENTS = frozenset({*range(0xC0, 0xD0), *range(0xDB, 0xF0), 0xFE} - {0xC8})
"""Markers that may come before the first scan; each is followed by its length."""

_MAX_PNG_CHUNKS = 20_000
"""With chunks of 4 KiB that is a file of 80 MiB. Pillow takes microseconds for each, holding the GIL."""

_MAX_SCALED_RATIO = 4
"""Up to this ratio of its sides the whole image is scaled and then cropped, bit for bit as torchvision does it."""

_SPARE = 2
"""A JPEG is decoded at no less than so many times the size that is wanted: scaling smooths away what was lost."""

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What undoes each value of the EXIF orientation."""
_LYING = frozenset({5, 6, 7, 8})
"""Orientations of images whose width and height change places when they are turned upright."""


def image_tensor(data: bytes, *, resize_size: int, crop_size: int, max_pixels: int, exact: bool = True) -> Tensor:
    """Decode an image file, turn it upright, scale its shorter side to `resize_size`, cut the middle square out.

    The format is told by the bytes, whatever the client declared. Transparency is dropped, as `convert("RGB")` does; an
    animation gives its first frame; 16 bits become the upper 8.

    Args:
        data: the whole file.
        resize_size: pixels, at least `crop_size`.
        crop_size: pixels.
        max_pixels: width times height, read from the header before anything is decoded.
        exact: see the module.
    Returns:
        uint8 [3, crop_size, crop_size], RGB, contiguous.
    Raises:
        ImageError: not one of the three formats, damaged, or smaller than `MIN_SIDE`.
        ImageTooLargeError: more than `max_pixels`.
    """
    file_type = _file_type(data)
    try:
        with file_type(BytesIO(data)) as image:
            _check_size(image, max_pixels)
            size = image.size
            window = (0.0, 0.0, float(size[0]), float(size[1])) if exact else _reduce(image, resize_size)
            upright = _upright_rgb(image)
            orientation = _orientation(image)
            if orientation in _LYING:
                size = size[::-1]
            window = _turned(window, image.size, orientation)
            return _tensor(_scale_and_crop(upright, size, window, resize_size, crop_size, exact=exact))
    except ImageError:
        raise
    except Image.DecompressionBombError as error:
        raise ImageTooLargeError(f"the image is too large: {error}; send a smaller one") from error
    except Exception as error:  # Pillow names no set of exceptions that damaged files raise, and it is a wide one
        message = (
            f"the {file_type.format} image is damaged and cannot be decoded ({error}); send the whole, intact file"
        )
        raise ImageError(message) from error


def _file_type(data: bytes) -> type[ImageFile]:
    """The reader for these bytes; also refuses files made to keep a decoder busy for minutes."""
    if data.startswith(b"\xff\xd8\xff"):
        _check_jpeg_structure(data)
        return JpegImageFile
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        _check_png_structure(data)
        return PngImageFile
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WebPImageFile
    raise ImageError("this is not an image: the bytes are neither JPEG nor PNG nor WebP; send one of these")


def _check_jpeg_structure(data: bytes) -> None:
    # In compressed data 0xFF is always followed by 0x00 or a restart marker, so this counts scans (and thumbnails').
    if data.count(b"\xff\xda") > _MAX_JPEG_SCANS:
        raise ImageError(f"the JPEG has more than {_MAX_JPEG_SCANS} scans; save it again as a baseline JPEG")
    position = 2
    for _ in range(_MAX_JPEG_SEGMENTS):
        start = data.find(b"\xff", position, position + _MAX_JPEG_JUNK_BYTES)
        marker = data[start + 1] if 0 <= start < len(data) - 1 else None
        if marker == 0xDA:
            return
        if marker in _JPEG_SEGMENTS:
            position = start + 2 + int.from_bytes(data[start + 2 : start + 4])
        elif marker in (0x00, 0xFF):  # junk, and fill bytes
            position = start + 1
        else:
            break
    raise ImageError("the JPEG image is damaged: no image data was found behind its header; send the intact file")


def _check_png_structure(data: bytes) -> None:
    position, end = 8, len(data)
    for _ in range(_MAX_PNG_CHUNKS):
        if position >= end:
            return
        position += 12 + int.from_bytes(data[position : position + 4])  # length, type, data, CRC
    raise ImageError(f"the PNG has more than {_MAX_PNG_CHUNKS} chunks; save it again")


def _check_size(image: Image.Image, max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise ImageTooLargeError(
            f"the image has {width}x{height} = {width * height} pixels, the limit is {max_pixels}; send a smaller one"
        )
    if min(width, height) < MIN_SIDE:
        raise ImageError(
            f"the image has {width}x{height} pixels, too few to tell anything from; "
            f"send one with at least {MIN_SIDE}x{MIN_SIDE}"
        )


def _reduce(image: ImageFile, resize_size: int) -> tuple[float, float, float, float]:
    """Have a JPEG decoded at a fraction of its size where that is enough. Gives where the picture is in what is decoded then."""
    width, height = image.size
    wanted = _SPARE * resize_size / min(width, height)
    # Pillow takes the smallest fraction that has at least this size.
    drafted = image.draft(None, (math.ceil(wanted * width), math.ceil(wanted * height))) if wanted < 1 else None
    return drafted[1] if drafted else (0.0, 0.0, float(width), float(height))


def _upright_rgb(image: Image.Image) -> Image.Image:
    image.load()
    method = _UPRIGHT.get(_orientation(image))
    image.info.pop("transparency", None)  # convert() would warn about it, or try to carry it over
    if image.mode.startswith("I"):  # 16 bits of grey; convert() would clip them at 255
        image = image.point(lambda value: value * (1 / 256)).convert("L")
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    return rgb if method is None else rgb.transpose(method)


def _turned(
    window: tuple[float, float, float, float], size: tuple[int, int], orientation: int
) -> tuple[float, float, float, float]:
    """Where a window of an image of this size is when the image has been turned upright."""
    (left, top, right, bottom), (width, height) = window, size
    if orientation in _LYING:
        left, top, right, bottom, width, height = top, left, bottom, right, height, width
    if orientation in (2, 3, 6, 7):
        left, right = width - right, width - left
    if orientation in (3, 4, 7, 8):
        top, bottom = height - bottom, height - top
    return left, top, right, bottom


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # noqa: BLE001 (as above; the picture is whole, only what is said about it is not)
        return 1


def _scale_and_crop(
    image: Image.Image,
    size: tuple[int, int],
    window: tuple[float, float, float, float],
    resize_size: int,
    crop_size: int,
    *,
    exact: bool,
) -> Image.Image:
    """
    Args:
        size: of the picture in its file.
        window: left, top, right and bottom of the picture in `image`, which may have been decoded at a fraction of its size.
    """
    width, height = size
    shorter = min(width, height)
    # The sizes and offsets are torchvision's: truncated sizes, rounded offsets.
    scaled_width, scaled_height = resize_size * width // shorter, resize_size * height // shorter
    left, top = round((scaled_width - crop_size) / 2), round((scaled_height - crop_size) / 2)
    right, bottom = left + crop_size, top + crop_size
    if exact and max(width, height) <= _MAX_SCALED_RATIO * shorter:
        scaled = image.resize((scaled_width, scaled_height), Image.Resampling.BILINEAR)
        return scaled.crop((left, top, right, bottom))
    # An image of 8 x 6,000,000 pixels would become one of 150 GB: scale only what the crop leaves of it.
    across, down = (window[2] - window[0]) / scaled_width, (window[3] - window[1]) / scaled_height
    box = (
        *(window[0] + left * across, window[1] + top * down),
        *(window[0] + right * across, window[1] + bottom * down),
    )
    return image.resize((crop_size, crop_size), Image.Resampling.BILINEAR, box=box)


def _tensor(image: Image.Image) -> Tensor:
    # Pillow puts the planes in order, not torch: a kernel of torch would start OpenMP threads for each decoding thread.
    planes = bytearray().join(band.tobytes() for band in image.split())
    return torch.frombuffer(planes, dtype=torch.uint8).view(3, image.height, image.width)
