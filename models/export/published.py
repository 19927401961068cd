"""Exports models of torchvision for `multiworld serve`, in a process of its own, into a cache."""

from __future__ import annotations

import difflib
import fcntl
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torchvision

from multiworld_serving.models.errors import ExportError, ModelError
from multiworld_serving.models.export.exporter import ExportOptions, export_model
from multiworld_serving.models.export.sources import (
    InputSpec,
    load_module,
    num_classes,
    published_labels,
    published_preprocessing,
)
from multiworld_serving.models.weights.checkpoints import SUFFIXES, read_checkpoint
from multiworld_serving.models.weights.labels import placeholder_labels
from multiworld_serving.models.weights.random_weights import parse_seed

_TIMEOUT_S = 1800.0
_CLASSIFIER = InputSpec("images", torch.float32, (3, 224, 224))


def exported(name: str, weights: str) -> Path:
    """The bundle of a torchvision model, exported if the cache does not have it. Blocks for seconds to minutes.

    Args:
        weights: a published name such as DEFAULT, random:SEED, or a file with a state dict.
    Raises:
        ExportError: it cannot be exported; the message says why.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or tempfile.gettempdir()) / ".cache")
    folder = cache / "multiworld" / "bundles"
    path = folder / f"{name}-{version_of(name, weights)}-torchvision-{torchvision.__version__}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:  # leaders of one service start together
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _export_in_child(name, weights, path)
    except OSError as error:
        raise ExportError(f"{name} cannot be exported to {folder}: {error.strerror or error}") from error
    return path


def check_name(name: str) -> None:
    """Raise ExportError if torchvision has no model with this name."""
    if name not in (known := torchvision.models.list_models()):
        near = " or ".join(difflib.get_close_matches(name, known))
        hint = (
            f"did you mean {near}?" if near else "expected the name of a model of torchvision, or the path of a bundle"
        )
        raise ExportError(f"--model {name}: torchvision {torchvision.__version__} has no such model; {hint}")


def _export_in_child(name: str, weights: str, path: Path) -> None:
    command = [sys.executable, "-P", "-m", "multiworld_serving.models.export.published", name, weights, str(path)]
    try:
        found = subprocess.run(  # noqa: S603 - arguments of ours, no shell
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ExportError(f"{name} was not exported within {_TIMEOUT_S:g} s") from error
    if found.returncode:
        raise ExportError((found.stderr.strip().splitlines() or [f"the export of {name} was killed"])[-1])


def version_of(name: str, weights: str) -> str:
    """The version of a bundle with these weights. Raises ModelError."""
    if weights.startswith("random"):
        return f"random-{parse_seed(weights)}"
    if Path(weights).suffix.lower() in SUFFIXES:
        return read_checkpoint(weights).version
    members = torchvision.models.get_model_weights(name)
    known = [member.name for member in members]
    if weights not in (*known, "DEFAULT"):
        raise ExportError(f"{name} has no weights {weights!r:.60}; expected {', '.join(known)}, random:SEED or a file")
    return str(members[weights].name if weights in known else members["DEFAULT"].name)


def export_published(name: str, weights: str, path: Path) -> None:
    """Export a model of torchvision with its published preprocessing. Classifiers answer probabilities.

    Raises:
        ModelError: it cannot be exported.
    """
    image = published_preprocessing(name, None)
    if image is None:
        raise ExportError(
            f"{name} does not take one image: export it with `multiworld export {name} --input …` and serve the bundle"
        )
    is_file, is_random = Path(weights).suffix.lower() in SUFFIXES, weights.startswith("random")
    if is_random:
        torch.manual_seed(parse_seed(weights))
    published = None if is_file or is_random else weights
    module = load_module(name, weights=published, checkpoint=weights if is_file else None)
    labels: tuple[str, ...] = ()
    if published_labels(name, None):
        count = num_classes(module, {_CLASSIFIER.name: _CLASSIFIER.example()}, image)
        labels = published_labels(name, published)
        labels = labels if len(labels) == count else placeholder_labels(count)
    options = ExportOptions(
        name, version_of(name, weights), (_CLASSIFIER.name,), num_stages=None, image=image, labels=labels
    )
    export_model(module, [_CLASSIFIER.example()], path, options)


if __name__ == "__main__":
    try:
        export_published(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    except ModelError as error:
        sys.exit(re.sub(r"\s+", " ", str(error)))
