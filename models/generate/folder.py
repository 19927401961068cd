"""A folder with a decoder as transformers stores it: config.json, *.safetensors, tokenizer.json. Imports no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from multiworld_serving.models.errors import StageSpecError

_HEADER_BYTES = 8


def digest_of(folder: Path) -> str:
    """Hash of the configuration and of the headers of the weights, which have their names, types and sizes. Raises StageSpecError."""
    found = hashlib.sha256()
    try:
        found.update((folder / "config.json").read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                head = file.read(_HEADER_BYTES)
                found.update(f"{path.name} {path.stat().st_size}".encode() + file.read(int.from_bytes(head, "little")))
    except OSError as error:
        raise StageSpecError(
            f"{folder} is not a folder with a model of transformers: {error.strerror} {error.filename}; expected config.json, "
            "*.safetensors and tokenizer.json"
        ) from error
    return found.hexdigest()
