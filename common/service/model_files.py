"""The files that the settings of a model name, and its bundle. Imports no torch, so that the supervisor can use it."""

import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import TypeVar

import msgspec

from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.models.errors import BundleError, StageSpecError, WeightsError
from multiworld_serving.models.export.bundle_cache import SUFFIXES, exported, trained_weights
from multiworld_serving.models.stages.pipeline import PipelineDescription, PipelineSource, expanded

S = TypeVar("S", bound=LeaderSettings)

MANIFEST = "manifest.json"
_PATH_CHARACTERS = 1024
_DEFAULT_WEIGHTS = ("DEFAULT", "auto")
"""Values of `--weights` that name no weights, so that they also fit a bundle."""


def check_model_files(settings: LeaderSettings) -> None:
    """Check that the files and folders exist. Reads none of them.

    Raises:
        models.ModelError: there is no such file or folder.
    """
    path = bundle_path(settings)
    if (pipeline := pipeline_source(settings)) is not None:
        pipeline.digest()
    elif path is not None and not os.path.exists(path):
        source = settings.model_source
        expected = (
            "expected the path of a bundle that `multiworld export` wrote, FILE.py:LIST, or a name such as resnet50"
        )
        raise BundleError(f"--model {source}: there is no such file or folder; {expected}")
    if path is not None and settings.weights not in _DEFAULT_WEIGHTS:
        raise WeightsError(
            f"--weights {settings.weights}: a bundle contains its weights; leave --weights out, or export the model with them"
        )
    if path is not None and settings.image_size is not None:
        raise BundleError("--image-size is decided when a bundle is made: export it with another one")
    weights = Path(settings.weights)
    if path is None and weights.suffix.lower() in SUFFIXES and not weights.is_file():
        raise WeightsError(f"--weights {settings.weights}: there is no such file")
    if settings.weights_dir is not None and not settings.weights_dir.is_dir():
        raise WeightsError(f"--weights-dir {settings.weights_dir}: there is no such folder")


def bundle_path(settings: LeaderSettings) -> Path | None:
    """The bundle that `--model` names by its path; None if it is the name of a model."""
    path = Path(settings.model_source)
    if pipeline_source(settings) is not None:
        return None
    return path if os.path.exists(path) or os.sep in settings.model_source or path.suffix else None


def pipeline_source(settings: LeaderSettings) -> PipelineSource | None:
    """The pipeline in Python that `--model` names; None if it names a bundle or a model of torchvision."""
    return PipelineSource.parse(settings.model_source)


def with_description(settings: S, description: PipelineDescription) -> S:
    """The settings of a pipeline in Python. Raises StageSpecError for settings of stages that it does not have."""
    found = expanded(description, settings.stage_settings)
    replicas = [
        each.replicas or settings.replicas for each in found.stages for _ in range(each.stages or settings.stages)
    ]
    if settings.weights not in _DEFAULT_WEIGHTS or settings.image_size is not None:
        raise StageSpecError("--weights and --image-size are not for pipelines in Python: load the weights in `setup`")
    pipeline = msgspec.json.encode(found).decode()
    return settings.model_copy(
        update={"pipeline": pipeline, "stages": len(replicas), "stage_replicas": tuple(replicas)}
    )


def served_name(settings: LeaderSettings) -> str:
    """The name of the model: as given, or as its bundle or torchvision names it. A bundle that cannot be read has its file's name."""
    path = bundle_path(settings)
    pipeline = pipeline_source(settings)
    if settings.model_name or path is None:
        return settings.model_name or (settings.model_source if pipeline is None else pipeline.stem)
    try:
        if path.is_dir():
            manifest = (path / MANIFEST).read_bytes()
        else:
            with zipfile.ZipFile(path) as archive:
                manifest = archive.read(MANIFEST)
        return str(json.loads(manifest)["name"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return path.stem


def available_weights(settings: LeaderSettings) -> str:
    """The weights to start with, "auto" replaced. A model of torchvision is exported if the cache does not have it. Blocks.

    Raises:
        models.ModelError: there is no such model, or it cannot be exported.
    """
    weights = settings.weights
    if bundle_path(settings) is None and pipeline_source(settings) is None:
        if weights == "auto":
            weights = trained_weights(
                settings.model_source, settings.max_batch_size or 1, image_size=settings.image_size
            )
        exported(settings.model_source, weights, settings.max_batch_size or 1, image_size=settings.image_size)
    return weights


def path_in(folder: Path | None, text: str) -> Path:
    """The path that an administrator names: below `--weights-dir`, so that the admin key does not grant access to the leader's disk.

    Raises:
        WeightsError: it is outside `folder`, or not a valid path, or there is no folder.
    """
    if folder is None:
        raise WeightsError(
            "files and bundles are loaded from --weights-dir only, but the service was started without it; "
            "start it with --weights-dir FOLDER. Published weights and random:SEED exist for models of torchvision only"
        )
    if len(text) > _PATH_CHARACTERS or "\0" in text:
        raise WeightsError("invalid path of a weights file: it is too long or contains a NUL character")
    root = folder.resolve()
    try:
        found = (root / text).resolve()
    except (OSError, RuntimeError) as error:  # such as a loop of symbolic links
        raise WeightsError(f"{text[:64]!r} cannot be resolved to a file") from error
    if not found.is_relative_to(root):
        raise WeightsError(f"{text[:64]!r} is not below the service's --weights-dir; give a path within it")
    return found


def model_path(settings: LeaderSettings, weights: str) -> Path:
    """The bundle of the model; one of torchvision is exported into the cache with these weights, unless it is there. Blocks.

    Raises:
        models.ModelError: there is no such model, or it cannot be exported.
    """
    return bundle_path(settings) or exported(
        settings.model_source, weights, settings.max_batch_size or 1, image_size=settings.image_size
    )
