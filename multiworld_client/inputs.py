"""What a program can give for a picture, and what is sent for it.

Neither numpy nor torch nor Pillow is imported: whoever gives something of theirs has imported them already.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from multiworld_client.errors import InputError

_SIGNATURES = {b"\xff\xd8\xff": "image/jpeg", b"\x89PNG\r\n\x1a\n": "image/png", b"RIFF": "image/webp"}
_DATATYPES = {"uint8": "UINT8", "float32": "FP32"}


@dataclass(frozen=True)
class FileInput:
    """A JPEG, PNG or WebP file."""

    content: bytes

    @property
    def media_type(self) -> str:
        """Raises InputError when it is none of those."""
        for signature, media_type in _SIGNATURES.items():
            if self.content.startswith(signature):
                return media_type
        raise InputError(f"these {len(self.content)} bytes are no JPEG, PNG or WebP file; give a file's whole content")


@dataclass(frozen=True)
class TensorInput:
    """Pixels of one or several pictures, or the files of several, as the Open Inference Protocol has them."""

    datatype: str
    shape: tuple[int, ...]
    content: bytes


def one(image: object) -> FileInput | TensorInput:
    """A picture: path, content of a file, Pillow's, or an array [3, S, S].

    Raises:
        InputError: it is none of these.
    """
    if (array := _array(image)) is not None:
        return _tensor(array[None] if array.ndim == 3 else array, given=array.shape, only=1)
    return FileInput(_content(image))


def several(images: object) -> TensorInput:
    """Pictures that belong together: an array [N, 3, S, S], or a sequence of what is no array.

    Raises:
        InputError: it is neither, or there are none.
    """
    if (array := _array(images)) is not None:
        return _tensor(array, given=array.shape)
    if not isinstance(images, Sequence) or isinstance(images, str | bytes) or not images:
        raise InputError(f"several pictures are an array [N, 3, S, S] or a list of files, not {type(images).__name__}")
    files = [_content(image) for image in images]
    return TensorInput("BYTES", (len(files),), b"".join(struct.pack("<I", len(file)) + file for file in files))


def _array(value: object) -> Any | None:
    """As an array of numpy, when it is one or a tensor of torch."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            return value.detach().cpu().resolve_conj().resolve_neg().numpy()
        except (TypeError, RuntimeError) as error:  # bfloat16, sparse, …
            raise InputError(
                f"a tensor of {value.dtype} cannot be sent ({error}); give uint8 (0 to 255) or float32"
            ) from error
    return value if numpy is not None and isinstance(value, numpy.ndarray) else None


def _tensor(array: Any, *, given: tuple[int, ...], only: int | None = None) -> TensorInput:
    name = str(array.dtype)
    if name not in _DATATYPES:
        raise InputError(f"an array of {name} cannot be sent; give uint8 (0 to 255) or float32 (0 to 1)")
    if array.ndim != 4 or array.shape[1] != 3 or not array.shape[0] or only not in (None, array.shape[0]):
        wanted = "[3, S, S] or [1, 3, S, S]" if only else "[N, 3, S, S]"
        raise InputError(
            f"an array of shape {list(given)} is no picture; expected {wanted}, RGB planes of the size that the model takes"
        )
    return TensorInput(_DATATYPES[name], tuple(map(int, array.shape)), array.tobytes())


def _as_in_a_file(image: Any) -> Any:
    """A Pillow image as a PNG can hold it, so that the service makes of it what it makes of the file that it comes from: upright, and
    with all bits of one that has 16, which Pillow's own conversion would cut off at 255."""
    from PIL import ImageOps  # noqa: PLC0415 - whoever has an image has it

    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I"):
        upright = upright.point(lambda value: value * (1 / 256)).convert("L")
    return upright.convert("RGB")


def _content(image: object) -> bytes:
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if isinstance(image, str | os.PathLike):
        try:
            return Path(image).read_bytes()
        except (OSError, ValueError) as error:
            raise InputError(f"{os.fspath(image)!r} cannot be read: {error}") from error
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(image, pillow.Image):
        file = BytesIO()
        _as_in_a_file(image).save(file, "PNG", compress_level=1)
        return file.getvalue()
    raise InputError(
        f"{type(image).__name__} is no picture; give a path, a file's content, a Pillow image, an array or a tensor"
    )
