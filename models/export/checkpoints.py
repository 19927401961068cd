"""Reads checkpoint files into dicts of tensors by torchvision's names. Never executes code from a file."""

import hashlib
import io
import pickle
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from multiworld_serving.models.errors import WeightsError

MAX_FILE_BYTES = 4 * 2**30
"""The largest model has 0.5 GB of weights, and less than this limit with gradients and optimiser state."""

_WRAPPERS = ("state_dict", "model_state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.", "model.")  # of DistributedDataParallel, torch.compile, Lightning
_NOT_IN_VERSIONS = re.compile(r"[^A-Za-z0-9_.:+-]")
_STEM_CHARACTERS = 80
_COUNTER = "num_batches_tracked"  # BatchNorm's; unused in eval mode, and missing in old checkpoints
_HOW_TO_SAVE = "save the weights alone with torch.save(model.state_dict(), path) or safetensors.torch.save_file"


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a file, on the CPU, and their version."""

    tensors: dict[str, Tensor]
    version: str
    """File name without its suffix, with other characters than those of versions as "_", and the first 12 hex digits of the SHA-256 of
    the file's content."""


def read_checkpoint(path: str) -> Checkpoint:
    """Read `.pth`, `.pt`, `.ckpt` (`weights_only=True`) or `.safetensors`.

    Accepts a plain state dict, or one wrapped as {"state_dict": ...}, {"model_state_dict": ...} or {"model": ...}. Removes a prefix that
    all names share because the model was wrapped in training ("module.").

    Raises:
        WeightsError: the file is missing, unreadable, truncated, contains code, or contains no tensors by name.
    """
    file = Path(path)
    content = _read_bytes(file)
    parse = _parse_safetensors if file.suffix.lower() == ".safetensors" else _parse_torch
    sha256 = hashlib.sha256(content).hexdigest()
    stem = _NOT_IN_VERSIONS.sub("_", file.stem).lstrip("_.:+-")[:_STEM_CHARACTERS] or "weights"
    return Checkpoint(_state_dict(parse(content, path), path), version=f"{stem}-{sha256[:12]}")


def _state_dict(data: Any, origin: str) -> dict[str, Tensor]:
    """Tensors by name, without wrappers and prefixes of training."""
    for wrapper in _WRAPPERS:
        if isinstance(data, Mapping) and isinstance(data.get(wrapper), Mapping):
            data = data[wrapper]
    if not isinstance(data, Mapping) or not data:
        found = "an empty dict" if isinstance(data, Mapping) else f"a {type(data).__name__}"
        raise WeightsError(f"{origin} contains {found}; expected a state dict (name to tensor): {_HOW_TO_SAVE}")
    for name, value in data.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise WeightsError(
                f"{origin} contains a {type(value).__name__} under {name!r}; expected a state dict (name to tensor): {_HOW_TO_SAVE}"
            )
    tensors = dict(data)
    for _ in _PREFIXES:  # prefixes may be nested: "module._orig_mod.conv1.weight"
        for prefix in _PREFIXES:
            if all(name.startswith(prefix) for name in tensors):
                tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def load_state(module: nn.Module, tensors: Mapping[str, Tensor], origin: str, owner: str) -> None:
    """Load a state dict into a module.

    Args:
        origin, owner: names of both, for messages.
    Raises:
        WeightsError: they do not fit together, or the state dict is of a quantised model.
    """
    expected = module.state_dict()
    tensors = {name: own for name, own in expected.items() if name.endswith(_COUNTER)} | dict(tensors)
    for name, own in expected.items():
        if (found := tensors.get(name)) is None or not own.is_floating_point():
            continue
        if not found.is_floating_point():
            raise WeightsError(f"{origin}: {name} is {found.dtype}; expected {own.dtype}, not a quantised model")
        if not bool(found.isfinite().all()):
            raise WeightsError(f"{origin}: {name} contains NaN or infinity; every answer would be NaN. Train it again")
    try:
        module.load_state_dict(tensors, strict=True)
    except RuntimeError as error:
        raise WeightsError(f"{origin} does not fit {owner}: {' '.join(str(error).split())[:400]}") from error


def _read_bytes(file: Path) -> bytes:
    # Read once, so that hash and tensors are of the same content even if the file is replaced meanwhile.
    try:
        if not file.is_file():
            raise WeightsError(f"there is no file {file} with weights; check the path (seen from {Path.cwd()})")
        if file.stat().st_size > MAX_FILE_BYTES:
            raise WeightsError(f"{file} is larger than {MAX_FILE_BYTES >> 30} GiB, {_HOW_TO_SAVE}")
        return file.read_bytes()
    except OSError as error:
        raise WeightsError(
            f"cannot read weights from {file}: {error.strerror or error}; check its permissions"
        ) from error


def _parse_safetensors(content: bytes, path: str) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise WeightsError(
            f"{path} is not a whole safetensors file ({_first_line(error)}); copy or download it again"
        ) from error


def _parse_torch(content: bytes, path: str) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns about pickle protocols
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{path} is damaged, or contains something other than tensors, such as a whole pickled model or code, which is never loaded; "
            f"{_HOW_TO_SAVE}"
        ) from error
    except Exception as error:  # a damaged pickle can raise any exception
        raise WeightsError(
            f"{path} is not a whole PyTorch checkpoint ({_first_line(error)}); copy or download it again"
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].partition('. ')[0][:200]}" if lines else type(error).__name__
