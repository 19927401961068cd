"""Converts images of the caller to what is sent.

numpy, torch and Pillow are not imported: a caller that passes one of their objects has already imported them.
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
DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}
"""Names of the Open Inference Protocol for the types of numpy."""


@dataclass(frozen=True)
class TensorInput:
    """An input tensor of the Open Inference Protocol, with its values as binary data."""

    datatype: str
    shape: tuple[int, ...]
    content: bytes

    @classmethod
    def of(cls, array: Any, datatype: str) -> TensorInput:
        """The values of a numpy array."""
        return cls(datatype, tuple(map(int, array.shape)), array.tobytes())

    def described(self, name: str) -> dict[str, object]:
        """The JSON part of an input with this name."""
        size = {"binary_data_size": len(self.content)}
        return {"name": name, "datatype": self.datatype, "shape": self.shape, "parameters": size}


def media_type(file: bytes) -> str:
    """Media type from the signature of a file. Raises InputError if it is not JPEG, PNG or WebP."""
    for signature, found in _SIGNATURES.items():
        if file.startswith(signature):
            return found
    raise InputError(f"these {len(file)} bytes are not a JPEG, PNG or WebP file; pass the whole content of a file")


def encode_image(image: object) -> bytes | TensorInput:
    """Encode one image: a path, the content of a file, a Pillow image, or an array or tensor [3, S, S].

    Returns:
        The content of a file, or pixels.
    Raises:
        InputError: it is none of these.
    """
    if (array := as_array(image)) is not None:
        return _pixels(array[None] if array.ndim == 3 else array, given=array.shape, single=True)
    return _content(image)


def encode_batch(images: object) -> TensorInput:
    """Encode several images: an array or tensor [N, 3, S, S], or a sequence of paths, contents of files and Pillow images.

    Raises:
        InputError: it is neither, or it is empty.
    """
    if (array := as_array(images)) is not None:
        return _pixels(array, given=array.shape)
    if not isinstance(images, Sequence) or isinstance(images, str | bytes) or not images:
        raise InputError(
            f"a batch must be an array [N, 3, S, S] or a non-empty list of images, not {type(images).__name__}"
        )
    files = [_content(image) for image in images]
    return TensorInput("BYTES", (len(files),), b"".join(struct.pack("<I", len(file)) + file for file in files))


def encode_tensor(name: str, value: object) -> TensorInput:
    """Encode the input `name` of a model, a numpy array or torch tensor. Raises InputError if it is neither."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:  # numpy has no bfloat16
        bits = value.detach().cpu().contiguous().view(torch.int16).numpy()
        return TensorInput.of(bits, "BF16")
    array = as_array(value)
    if array is None or str(array.dtype) not in DATATYPES:
        found = type(value).__name__ if array is None else f"an array of {array.dtype}"
        raise InputError(f"the input {name!r} is {found}; pass a numpy array or a torch tensor of numbers or booleans")
    return TensorInput.of(array, DATATYPES[str(array.dtype)])


def as_array(value: object) -> Any | None:
    """The numpy array of a numpy array or torch tensor; None for other types."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        try:
            return value.detach().cpu().resolve_conj().resolve_neg().numpy()
        except (TypeError, RuntimeError) as error:  # bfloat16, sparse, …
            raise InputError(
                f"a tensor of {value.dtype} cannot be sent ({error}); pass uint8 (0 to 255) or float32 (0 to 1)"
            ) from error
    return value if numpy is not None and isinstance(value, numpy.ndarray) else None


def _pixels(array: Any, *, given: tuple[int, ...], single: bool = False) -> TensorInput:
    name = str(array.dtype)
    if name not in ("uint8", "float32"):
        raise InputError(f"an array of {name} cannot be sent; pass uint8 (0 to 255) or float32 (0 to 1)")
    if array.ndim != 4 or array.shape[1] != 3 or not array.shape[0] or (single and array.shape[0] != 1):
        expected = "[3, S, S] or [1, 3, S, S]" if single else "[N, 3, S, S]"
        raise InputError(
            f"an array of shape {list(given)} is not an image; expected {expected}: RGB, channels first, in the model's image size"
        )
    return TensorInput.of(array, DATATYPES[name])


def _to_rgb(image: Any) -> Any:
    """Convert a Pillow image as the service converts its file: rotated by EXIF, and with 16-bit values scaled to 8 bits
    (Pillow's own conversion clips them at 255)."""
    from PIL import ImageOps  # noqa: PLC0415 - the caller has imported Pillow

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
            raise InputError(f"cannot read {os.fspath(image)!r}: {error}") from error
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(image, pillow.Image):
        file = BytesIO()
        _to_rgb(image).save(file, "PNG", compress_level=1)
        return file.getvalue()
    raise InputError(
        f"{type(image).__name__} is not an image; pass a path, the content of a file, a Pillow image, an array or a tensor"
    )
