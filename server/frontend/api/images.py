"""Decodes a JPEG, PNG or WebP file to the uint8 tensor that the first stage takes.

Scaling and cropping match torchvision's `ImageClassification` transform before normalization, so accuracy over HTTP equals accuracy in a
notebook. A JPEG much larger than needed is decoded at 1/2, 1/4 or 1/8 of its size, and only the crop is scaled. Other images are scaled by
torch, in half of Pillow's time. Small images differ from torchvision by at most two grey levels, large photographs by less than one on
average. Time and memory do not depend on the aspect ratio. simplejpeg decodes small JPEGs in half of Pillow's time, to the same pixels.

All functions are synchronous and stateless; `DaemonThreads` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from io import BytesIO
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import simplejpeg
import torch
from PIL import ExifTags, Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile
from torch import Tensor
from torch.nn.functional import interpolate

from multiworld_serving.common.service.errors import ImageError, ImageTooLargeError
from multiworld_serving.common.service.predictor import ImageSizes

LARGE_PIXELS = 1 << 22
"""Decoding more pixels takes tens to hundreds of megabytes."""
MIN_SIDE = 8
"""Pixels. No class can be recognized in a smaller image; digits have 8x8."""

_JPEG = b"\xff\xd8\xff"
_JPEG_END = b"\xff\xd9"
_QUICK_BYTES = 1 << 13
_QUICK_PIXELS = 1 << 16
_MAX_JPEG_SCANS = 200
"""A progressive JPEG has about ten scans. Decoding processes the whole image once per scan, so thousands take minutes."""
_MAX_JPEG_SEGMENTS = 1000
"""Segments before the first scan, each preceded by at most this much junk. Pillow parses both bytewise and holds the GIL."""
_MAX_JPEG_JUNK_BYTES = 64
_JPEG_SEGMENTS = frozenset({*range(0xC0, 0xD0), *range(0xDB, 0xF0), 0xFE} - {0xC8})
"""Markers allowed before the first scan; a length follows each."""
_JPEG_SEGMENT = Struct("!xBH")
"""How a segment begins: 0xFF, its marker, and its length without these two bytes."""
_JPEG_CHANNELS = (1, 3)
"""Grey, and color without a profile for printing."""

_MAX_PNG_CHUNKS = 20_000
"""In chunks of 4 KiB, a file of 80 MiB. Pillow takes microseconds per chunk and holds the GIL."""

_MAX_SCALED_RATIO = 4
"""Up to this aspect ratio, the whole image is scaled and then cropped, bit for bit like torchvision."""

_MIN_OVERSAMPLING = 2
"""A JPEG is decoded at no less than this many times the needed size; scaling then hides the difference."""

Pixels: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_FLIPPED_AXES = {2: (2,), 3: (1, 2), 4: (1,), 6: (1,), 7: (1, 2), 8: (2,)}
"""Axes of the pixels [3, height, width] to flip for each EXIF orientation."""
_SWAPPED_AXES = range(5, 9)
"""Orientations that swap height and width, after the flips."""


class LargeImageError(Exception):
    """More than `LARGE_PIXELS` would be decoded. Large images are decoded one at a time."""


class QuickJpeg(NamedTuple):
    """The size in pixels of a JPEG that decodes in little more time than handing it to a thread and back takes."""

    width: int
    height: int


def image_tensor(
    data: bytes, sizes: ImageSizes, max_pixels: int, *, allow_large: bool = True, quick: QuickJpeg | None = None
) -> Tensor:
    """Decode an image file, apply its orientation, scale its shorter side to `resize_size` and crop the center.

    The bytes determine the format, not the declared content type. Transparency is dropped as by `convert("RGB")`; of an
    animation the first frame is used; of 16-bit samples the upper 8 bits.

    Args:
        data: the whole file.
        max_pixels: maximum width times height, checked before decoding.
        quick: what `quick_jpeg` has found in the file.
    Returns:
        uint8 [3, crop_size, crop_size], RGB, contiguous.
    Raises:
        ImageError: unknown format, damaged, or smaller than `MIN_SIDE`.
        ImageTooLargeError: more than `max_pixels`.
        LargeImageError: it is large, and `allow_large` is false.
    """
    quick = quick or quick_jpeg(data)
    file_type = _file_type(data) if quick is None else JpegImageFile
    try:
        if quick is not None:
            _check_size(quick, max_pixels)
            # A buffer of this size: simplejpeg refuses an image with more pixels than the header says.
            lines = np.empty((quick.height, quick.width, 3), np.uint8)
            simplejpeg.decode_jpeg(data, "RGB", buffer=lines, strict=False)
            return _crop_whole(lines, _crop(quick, sizes))
        with file_type(BytesIO(data)) as image:
            _check_size(image.size, max_pixels)
            size, window = image.size, _reduce(image, sizes.resize_size)
            if not allow_large and math.prod(size if "progressive" in image.info else image.size) > LARGE_PIXELS:
                raise LargeImageError
            rgb, orientation = _rgb(image), _orientation(image)
            # The crop is turned, and not the image: it is smaller.
            flipped = _FLIPPED_AXES.get(orientation, ())
            pixels = _scale_and_crop(rgb, size, window, sizes, flipped)
            pixels = pixels.flip(flipped) if flipped else pixels
            return (pixels.transpose(1, 2) if orientation in _SWAPPED_AXES else pixels).contiguous()
    except (ImageError, LargeImageError):
        raise
    except Image.DecompressionBombError as error:
        raise ImageTooLargeError(f"the image is too large: {error}; send a smaller one") from error
    except Exception as error:  # Pillow does not document which exceptions damaged files raise; there are many
        message = f"the {file_type.format} image is damaged and cannot be decoded ({error}); send the complete file"
        raise ImageError(message) from error


def _file_type(data: bytes) -> type[ImageFile]:
    """The Pillow class for these bytes. Also rejects files constructed to decode for minutes."""
    if data.startswith(_JPEG):
        _check_jpeg_structure(data)
        return JpegImageFile
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        _check_png_structure(data)
        return PngImageFile
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WebPImageFile
    raise ImageError("this is not an image: the bytes are neither JPEG nor PNG nor WebP; send one of these")


def quick_jpeg(data: bytes) -> QuickJpeg | None:
    """Describes a small baseline JPEG without EXIF; None for other files, also incomplete ones. Raises ImageError.

    Reading the other metadata takes Pillow as long as decoding.
    """
    if len(data) > _QUICK_BYTES or not data.startswith(_JPEG) or not data.endswith(_JPEG_END):
        return None
    frame = _check_jpeg_structure(data)
    if frame is None or frame + 9 >= len(data):
        return None
    height, width = (int.from_bytes(data[at : at + 2]) for at in (frame + 5, frame + 7))
    is_quick = data[frame + 9] in _JPEG_CHANNELS and height * width <= _QUICK_PIXELS and _is_ordinary(width, height)
    return QuickJpeg(width, height) if is_quick else None


def _check_jpeg_structure(data: bytes) -> int | None:
    """Returns the position of the header with the size if the JPEG is baseline and has no EXIF; None if not. Raises ImageError."""
    # In compressed data 0xFF is always followed by 0x00 or a restart marker, so this counts scans, thumbnails' included.
    if data.count(b"\xff\xda") > _MAX_JPEG_SCANS:
        raise ImageError(f"the JPEG has more than {_MAX_JPEG_SCANS} scans; save it again as a baseline JPEG")
    position, baseline, has_exif = 2, None, False
    last = len(data) - _JPEG_SEGMENT.size
    for _ in range(_MAX_JPEG_SEGMENTS):
        start = data.find(b"\xff", position, position + _MAX_JPEG_JUNK_BYTES)
        if not 0 <= start <= last:
            break
        marker, segment_bytes = _JPEG_SEGMENT.unpack_from(data, start)
        if marker == 0xDA:
            return None if has_exif else baseline
        if marker in _JPEG_SEGMENTS:
            if marker == 0xC0:
                baseline = start
            elif marker == 0xE1:
                has_exif = True
            position = start + 2 + segment_bytes
        elif marker in (0x00, 0xFF):  # junk and fill bytes
            position = start + 1
        else:
            break
    raise ImageError("the JPEG image is damaged: no image data was found after its header; send the complete file")


def _check_png_structure(data: bytes) -> None:
    position, end = 8, len(data)
    for _ in range(_MAX_PNG_CHUNKS):
        if position >= end:
            return
        position += 12 + int.from_bytes(data[position : position + 4])  # length, type, data, CRC
    raise ImageError(f"the PNG has more than {_MAX_PNG_CHUNKS} chunks; save it again")


def _check_size(size: tuple[int, int], max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise ImageTooLargeError(
            f"the image has {width}x{height} = {width * height} pixels, the limit is {max_pixels}; send a smaller one"
        )
    if min(width, height) < MIN_SIDE:
        raise ImageError(
            f"the image has {width}x{height} pixels, too few to classify; send one with at least {MIN_SIDE}x{MIN_SIDE}"
        )


def _reduce(image: Image.Image, resize_size: int) -> tuple[float, float, float, float]:
    """Let Pillow decode a JPEG at a fraction of its size if that is sufficient. Returns the image's box in the decoded one."""
    width, height = image.size
    wanted = _MIN_OVERSAMPLING * resize_size / min(width, height)
    # Pillow selects the smallest fraction that is at least this size.
    drafted = image.draft(None, (math.ceil(wanted * width), math.ceil(wanted * height))) if wanted < 1 else None
    return drafted[1] if drafted else (0.0, 0.0, float(width), float(height))


def _rgb(image: Image.Image) -> Image.Image:
    image.load()
    image.info.pop("transparency", None)  # convert() would warn about it or try to keep it
    if image.mode.startswith("I"):  # 16-bit grey; convert() would clip at 255
        image = image.point(lambda value: value * (1 / 256)).convert("L")
    return image if image.mode == "RGB" else image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # noqa: BLE001 (as above; only the metadata is damaged, not the pixels)
        return 1


class _Crop(NamedTuple):
    """The size to which the whole image is scaled, and the window that is cut out then, in pixels."""

    width: int
    height: int
    left: int
    top: int
    side: int


@lru_cache(1024)
def _crop(size: tuple[int, int], sizes: ImageSizes, flipped: Sequence[int] = ()) -> _Crop:
    """Scales the shorter side to `resize_size`. The center is rounded towards the other end of the axes that are flipped later."""
    (width, height), (resize_size, crop_size) = size, sizes
    shorter = min(width, height)
    # As in torchvision: truncated sizes, rounded offsets.
    scaled_width, scaled_height = resize_size * width // shorter, resize_size * height // shorter
    top, left = (
        (spare - round(spare / 2) if axis in flipped else round(spare / 2))
        for axis, spare in ((1, scaled_height - crop_size), (2, scaled_width - crop_size))
    )
    return _Crop(scaled_width, scaled_height, left, top, crop_size)


def _is_ordinary(width: int, height: int) -> bool:
    """Whether the whole image may be scaled: one of 8 x 6,000,000 pixels would need 150 GB."""
    return max(width, height) <= _MAX_SCALED_RATIO * min(width, height)


def _scale_and_crop(
    image: Image.Image,
    size: tuple[int, int],
    window: tuple[float, float, float, float],
    sizes: ImageSizes,
    flipped: Sequence[int],
) -> Tensor:
    """Scale so that the shorter side is `resize_size`, and crop the center.

    Args:
        size: of the image in its file.
        window: left, top, right and bottom of the image in `image`, which may be decoded at a fraction of its size.
        flipped: axes of the result that are to be flipped, see `_crop`.
    Returns:
        uint8 [3, crop_size, crop_size].
    """
    crop = _crop(size, sizes, flipped)
    if _is_ordinary(*size) and image.size == size:
        return _crop_whole(_lines(image), crop)
    across, down = (window[2] - window[0]) / crop.width, (window[3] - window[1]) / crop.height
    box = (
        *(window[0] + crop.left * across, window[1] + crop.top * down),
        *(window[0] + (crop.left + crop.side) * across, window[1] + (crop.top + crop.side) * down),
    )
    lines = _lines(image.resize((crop.side, crop.side), Image.Resampling.BILINEAR, box=box))
    return torch.from_numpy(lines).permute(2, 0, 1)


def _crop_whole(lines: Pixels, crop: _Crop) -> Tensor:
    """The window of the scaled image, from all its pixels. NumPy cuts it out in a third of torch's time."""
    planes = lines.transpose(2, 0, 1)
    if planes.shape[1:] != (crop.height, crop.width):
        image = torch.from_numpy(planes[None])
        planes = interpolate(image, (crop.height, crop.width), mode="bilinear", antialias=True).numpy()[0]
    window = planes[:, crop.top : crop.top + crop.side, crop.left : crop.left + crop.side]
    return torch.from_numpy(np.ascontiguousarray(window))


def _lines(image: Image.Image) -> Pixels:
    """The pixels as uint8 [height, width, 3]."""
    return np.frombuffer(bytearray(image.tobytes()), np.uint8).reshape(image.height, image.width, 3)
