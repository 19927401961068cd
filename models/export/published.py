"""Exports models of torchvision for `multiworld serve`, in a process of its own, into a cache."""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
from multiworld_serving.models.preprocessing import Preprocessing
from multiworld_serving.models.weights import pretrained
from multiworld_serving.models.weights.checkpoints import SUFFIXES, read_checkpoint
from multiworld_serving.models.weights.labels import placeholder_labels
from multiworld_serving.models.weights.random_weights import parse_seed

logger = logging.getLogger(__name__)

_TIMEOUT_S = 1800.0
_CLASSIFIER = InputSpec("images", torch.float32, (3, 224, 224))
_KEY_LETTERS = 12
_MAX_BATCH_SIZE = 64
"""Bundles compute batches of at least this size, so that most services share one in the cache."""


@dataclass(frozen=True)
class PublishedModel:
    """A model of torchvision, and how it is exported.

    Attributes:
        weights: a published name such as DEFAULT, "random:SEED", or a file with a state dict, which also determines the number of classes.
        image: preprocessing of the images.
    """

    name: str
    weights: str
    image: Preprocessing
    max_batch_size: int

    @classmethod
    def choose(
        cls,
        name: str,
        weights: str,
        *,
        max_batch_size: int = _MAX_BATCH_SIZE,
        image_size: int | None = None,
        resize_size: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> PublishedModel:
        """Complete what is not given (None) by what torchvision publishes with the weights.

        Args:
            weights: as above, or "auto": DEFAULT if these are cached or their host answers, else random:0 with a warning.
        Raises:
            ModelError: torchvision has no such model or weights, the model does not take one image, or a value is out of range.
        """
        check_name(name)
        if weights == "auto":
            weights = _available(name)
        image = published_preprocessing(name, weights if _is_published(weights) else None)
        if image is None:
            raise ExportError(
                f"{name} does not take one image: export it with `multiworld export {name} --input …` and serve the bundle"
            )
        image = image.with_overrides(image_size=image_size, resize_size=resize_size, mean=mean, std=std)
        return cls(name, weights, image, max(max_batch_size, _MAX_BATCH_SIZE))

    @property
    def version(self) -> str:
        """The version of the bundle. Raises ModelError if a file cannot be read."""
        if self.weights.startswith("random"):
            return f"random-{parse_seed(self.weights)}"
        if not _is_published(self.weights):
            return read_checkpoint(self.weights).version
        return str(torchvision.models.get_model_weights(self.name)[self.weights.rpartition(".")[2]].name)


def exported(model: PublishedModel) -> Path:
    """The bundle of a torchvision model, exported if the cache does not have it. Blocks for seconds to minutes.

    Raises:
        ExportError: it cannot be exported; the message says why.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.environ.get("HOME") or tempfile.gettempdir()) / ".cache")
    folder = cache / "multiworld" / "bundles"
    options = json.dumps([asdict(model.image), model.max_batch_size, torchvision.__version__, torch.__version__])
    key = hashlib.sha256(options.encode()).hexdigest()[:_KEY_LETTERS]
    path = folder / f"{model.name}-{model.version}-{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:  # leaders of one service start together
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _export_in_child(model, path)
    except OSError as error:
        raise ExportError(f"{model.name} cannot be exported to {folder}: {error.strerror or error}") from error
    return path


def _is_published(weights: str) -> bool:
    return not weights.startswith("random") and Path(weights).suffix.lower() not in SUFFIXES


def _available(name: str) -> str:
    members = list(torchvision.models.get_model_weights(name))
    if members and pretrained.is_reachable(members[-1]):
        return "DEFAULT"
    pretrained.warn_untrained(
        name, f"the host of {members[-1].url} did not answer" if members else "torchvision publishes no weights for it"
    )
    return pretrained.UNTRAINED


def check_name(name: str) -> None:
    """Raise ExportError if torchvision has no model with this name."""
    if name not in (known := torchvision.models.list_models()):
        near = " or ".join(difflib.get_close_matches(name, known))
        hint = (
            f"did you mean {near}?" if near else "expected the name of a model of torchvision, or the path of a bundle"
        )
        raise ExportError(f"--model {name}: torchvision {torchvision.__version__} has no such model; {hint}")


def _export_in_child(model: PublishedModel, path: Path) -> None:
    options = json.dumps(asdict(model))
    command = [sys.executable, "-P", "-m", "multiworld_serving.models.export.published", options, str(path)]
    logger.info("exporting %s with weights %s; the bundle is kept in %s", model.name, model.weights, path.parent)
    try:
        found = subprocess.run(  # noqa: S603 - arguments of ours, no shell
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ExportError(f"{model.name} was not exported within {_TIMEOUT_S:g} s") from error
    if found.returncode:
        raise ExportError((found.stderr.strip().splitlines() or [f"the export of {model.name} was killed"])[-1])


def export_published(model: PublishedModel, path: Path) -> None:
    """Export a model of torchvision. Classifiers answer probabilities.

    Raises:
        ModelError: it cannot be exported.
    """
    published = model.weights if _is_published(model.weights) else None
    if model.weights.startswith("random"):
        torch.manual_seed(parse_seed(model.weights))
    checkpoint = model.weights if Path(model.weights).suffix.lower() in SUFFIXES else None
    module = load_module(model.name, weights=published, checkpoint=checkpoint)
    labels: tuple[str, ...] = ()
    if published_labels(model.name, None):
        count = num_classes(module, {_CLASSIFIER.name: _CLASSIFIER.example()}, model.image)
        labels = published_labels(model.name, published)
        labels = labels if len(labels) == count else placeholder_labels(count)
    options = ExportOptions(
        model.name,
        model.version,
        (_CLASSIFIER.name,),
        max_batch_size=model.max_batch_size,
        num_stages=None,
        image=model.image,
        labels=labels,
    )
    export_model(module, [_CLASSIFIER.example()], path, options)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    try:
        asked = PublishedModel(**{**given, "image": Preprocessing(**given["image"])})
        export_published(asked, Path(sys.argv[2]))
    except ModelError as error:
        sys.exit(re.sub(r"\s+", " ", str(error)))
