"""Bundles of torchvision models, exported once into a cache. Imports no torch: the export runs in a process of its own."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

from multiworld_serving.models.cache_folder import cache_folder
from multiworld_serving.models.errors import ExportError, WeightsError

logger = logging.getLogger(__name__)

SUFFIXES = (".pth", ".pt", ".ckpt", ".safetensors")
"""Endings of the names of files with weights."""
_MAX_SEED = 2**63 - 1
_TIMEOUT_S = 1800.0
_HOST = "https://download.pytorch.org"
_PROBE_TIMEOUT_S = 3.0
"""How long "auto" waits for it, besides DNS."""
_MIN_BATCH_SIZE = 64
"""Bundles compute batches of at least this size, so that most services share one in the cache."""
_KEY_LETTERS = 12
UNTRAINED = "random:0"
"""What "auto" uses if there are no trained weights."""
_NOT_IN_FILE_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
WEIGHTS_STATUS = 3
"""Exit status of the process that exports if the weights cannot be loaded."""
_LAYOUT = 3
"""Increases when bundles of one model become different in another release."""


@dataclass(frozen=True)
class CachedModel:
    """What is exported.

    Attributes:
        weights: see `torchvision_models.load_model`.
        image_size: side of the images; None: as published.
    """

    name: str
    weights: str
    max_batch_size: int = _MIN_BATCH_SIZE
    image_size: int | None = None

    def path(self) -> Path:
        """Where the cache has the bundle, if it has it. Reads and hashes a file with weights.

        Raises:
            WeightsError: the file cannot be read.
            ExportError: see `cache_folder`.
        """
        weights = self.weights
        if weights == "random" or weights.startswith("random:"):
            weights = f"random-{parse_seed(weights)}"
        elif Path(weights).suffix.lower() in SUFFIXES:
            weights = f"{Path(weights).stem}-{_sha256(weights)}"
        versions = version("torch"), version("torchvision")
        key = json.dumps([weights, self.max_batch_size, self.image_size, versions, _LAYOUT])
        digest = hashlib.sha256(key.encode()).hexdigest()[:_KEY_LETTERS]
        label = _NOT_IN_FILE_NAMES.sub("_", f"{self.name}-{weights}")[:80]
        return cache_folder("bundles") / f"{label}-{digest}"


def exported(name: str, weights: str, max_batch_size: int = _MIN_BATCH_SIZE, *, image_size: int | None = None) -> Path:
    """The bundle of a torchvision model, exported if the cache does not have it. Blocks for up to a minute, or for a download.

    Args:
        weights: see `torchvision_models.load_model`; or "auto", see `trained_weights`.
    Raises:
        ModelError: it cannot be exported; the message says why.
    """
    if weights == "auto":
        weights = trained_weights(name, max_batch_size, image_size=image_size)
    return _export(CachedModel(name, weights, max(max_batch_size, _MIN_BATCH_SIZE), image_size))


def trained_weights(name: str, max_batch_size: int, *, image_size: int | None = None) -> str:
    """DEFAULT if the model can be exported with these weights, else random:0 with a warning.

    If their host does not answer, weights in torch.hub's cache are tried only if the cache has no bundle with random weights.
    """
    model = CachedModel(name, "DEFAULT", max(max_batch_size, _MIN_BATCH_SIZE), image_size)
    reason = None if model.path().exists() else _why_unreachable()
    if reason is None or not replace(model, weights=UNTRAINED).path().exists():
        try:
            _export(model)
        except WeightsError as error:
            reason = reason or str(error)
        else:
            return model.weights
    logger.warning(
        "NO TRAINED WEIGHTS: %s has %s, so its predictions are meaningless (%s). Pass --weights FILE for real ones.",
        *(name, UNTRAINED, reason),
    )
    return UNTRAINED


def _why_unreachable() -> str | None:
    """Why no published weights can be downloaded now. None if they can."""
    request = urllib.request.Request(_HOST, method="HEAD", headers={"User-Agent": "torch.hub"})
    try:
        with urllib.request.urlopen(request, timeout=_PROBE_TIMEOUT_S):  # noqa: S310
            return None
    except urllib.error.HTTPError:
        return None  # the host answers
    except (OSError, ValueError) as error:  # refused, unreachable, unknown, silent, or a malformed URL of a proxy
        return f"{_HOST} cannot be reached: {getattr(error, 'reason', None) or error}"


def _sha256(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise WeightsError(f"cannot read weights from {path}: {error.strerror or error}; check the path") from error


def _export(model: CachedModel) -> Path:
    path = model.path()
    if path.exists():
        return path
    logger.info(
        "exporting %s with weights %s: this takes up to a minute, and later starts take it from %s",
        *(model.name, model.weights, path.parent),
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / "lock").open("w") as lock:  # leaders of one machine start together
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                for unfinished in path.parent.glob(f".{path.name}-*"):  # of a process that was killed
                    shutil.rmtree(unfinished, ignore_errors=True)
                _export_in_child(model, path)
    except OSError as error:
        raise ExportError(f"{model.name} cannot be exported to {path}: {error.strerror or error}") from error
    return path


def _export_in_child(model: CachedModel, path: Path) -> None:
    began_s = time.monotonic()
    command = [sys.executable, "-P", "-m", "multiworld_serving.models.export.torchvision_models"]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(  # noqa: S603 - arguments of ours, no shell
            [*command, json.dumps(asdict(model)), str(path)], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child,
    ):
        deadline = threading.Timer(_TIMEOUT_S, child.kill)
        deadline.start()
        try:
            assert child.stdout is not None
            for step in child.stdout:
                logger.info("exporting %s: %s after_s=%.1f", model.name, step.strip(), time.monotonic() - began_s)
        except BaseException:
            child.kill()
            raise
        finally:
            deadline.cancel()
        status = child.wait()
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if status:
        found = lines[-1] if lines else f"the export of {model.name} was killed (status {status})"
        raise (WeightsError if status == WEIGHTS_STATUS else ExportError)(found)
    logger.info("exported %s after_s=%.1f", model.name, time.monotonic() - began_s)


def parse_seed(text: str) -> int:
    """The seed in "random:SEED".

    Raises:
        WeightsError: the seed is not a whole number from 0 to 2**63 - 1.
    """
    digits = text.removeprefix("random").removeprefix(":")
    if not (digits.isascii() and digits.isdecimal()) or int(digits[:20]) > _MAX_SEED:
        raise WeightsError(f"weights {text!r} have no valid seed; expected random:SEED with a number, such as random:0")
    return int(digits)
