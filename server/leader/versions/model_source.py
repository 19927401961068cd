"""The model that is served, and further versions of it with the same interface: from bundles, or exported into the cache."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from multiworld_serving.common.config.process import check_memory
from multiworld_serving.common.service.model_files import (
    bundle_path,
    check_model_files,
    model_path,
    path_in,
)
from multiworld_serving.common.service.predictor import ImageSizes, ModelVersion, ServedModel
from multiworld_serving.common.settings.leader import LeaderSettings
from multiworld_serving.models.bundle.files import Bundle
from multiworld_serving.models.errors import BundleError, WeightsError
from multiworld_serving.models.export.bundle_cache import SUFFIXES
from multiworld_serving.models.export.independence import read_proven
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.server.leader.versions.pipeline_plan import open_pipeline
from multiworld_serving.server.leader.versions.stage_plan import make_bundle_plan
from multiworld_serving.server.leader.versions.version_table import VersionPlan, VersionTable

logger = logging.getLogger(__name__)

_COPIES_WHILE_EXPORTING = 4
"""Copies in memory while weights are exported: the file, its tensors, the module, the bundle."""
_INTERFACE = ("inputs", "outputs", "dimensions", "image", "labels")
"""What clients rely on: the fields of `ServedModel` that all versions have in common."""


class ModelSource:
    """Finds the bundle that `--model` names, or exports a model of torchvision into the cache."""

    def __init__(self, settings: LeaderSettings) -> None:
        self._settings = settings
        self._first: Bundle | None = None

    def open(self, tuning: Tuning) -> tuple[ServedModel, VersionPlan]:
        """The version with which the service starts. Blocks: loads, reads and hashes its weights.

        Raises:
            models.ModelError: it cannot be loaded, or does not fit the settings.
        """
        settings = self._settings
        check_model_files(settings)
        if settings.pipeline is not None:
            return open_pipeline(settings, tuning)
        self._first = bundle = self._read(settings.weights)
        manifest = bundle.manifest
        manifest.check_batch_size(settings.max_batch_size)
        logger.debug("partitioning %s@%s into %d stages", manifest.name, manifest.version, settings.stages)
        version = ModelVersion(1, manifest.version, bundle.digest)
        return _served(bundle, settings.model_name), VersionPlan(
            version, make_bundle_plan(bundle, settings.stages, tuning)
        )

    def load(self, weights: str | None, versions: VersionTable) -> VersionPlan:
        """Load, check and partition a version (None: that of the settings). Blocks.

        Raises:
            models.ModelError: there is no such version, it is not allowed, invalid, or has another interface.
            MemoryError: there is not enough memory for another version.
        """
        first = self._first
        if first is None:
            if weights is None:
                return versions.current
            raise BundleError(
                f"{self._settings.model_source} is a pipeline in Python, whose versions are models of their own: add the other one with "
                "`multiworld models add NAME@VERSION=FILE.py:LIST`"
            )
        bundle = self._bundle(weights, first)
        manifest, stages = bundle.manifest, versions.current.stages
        logger.info("version %s is loaded; splitting it into %d stages", manifest.version, len(stages))
        if manifest.name != first.manifest.name:
            raise BundleError(
                f"the bundle is the model {manifest.name!r}, but the service serves {first.manifest.name!r}; "
                f"export it with --name {first.manifest.name}, or serve it as a separate service"
            )
        expected, found = _served(first), _served(bundle)
        if changed := [field for field in _INTERFACE if getattr(expected, field) != getattr(found, field)]:
            raise BundleError(
                f"{manifest.name}@{manifest.version} has other {' and '.join(changed)} than the service: "
                f"{_shown(expected, changed)}, but the bundle has {_shown(found, changed)}; serve it as a separate service"
            )
        digest = bundle.digest
        if versions.digest_of(manifest.version) not in (None, digest):
            raise BundleError(
                f"{manifest.name}@{manifest.version} has the digest {digest}, but the service knows version {manifest.version} with "
                f"the digest {versions.digest_of(manifest.version)}; export it with another --version"
            )
        if manifest.version == versions.current.version.name:
            return versions.current
        version = ModelVersion(versions.number_of(manifest.version), manifest.version, digest)
        return VersionPlan(version, make_bundle_plan(bundle, len(stages), stages[0].tuning, version.number))

    def _bundle(self, weights: str | None, first: Bundle) -> Bundle:
        """A further version by the name that an administrator gives (None: that of the settings). Blocks.

        Labels and resizing of a model of torchvision stay those of the first version, because clients and frontends rely on them.

        Args:
            weights: of a model of torchvision: as `--weights`, with files below `--weights-dir`. Otherwise the path of a bundle below it.
        Raises:
            models.ModelError: it does not exist, is not allowed, or is invalid.
            MemoryError: there is not enough memory for another version.
        """
        settings = self._settings
        if bundle_path(settings) is None:
            check_memory(_COPIES_WHILE_EXPORTING * first.graph.weights_bytes)
            return _like(first, self._read(settings.weights if weights is None else self._allowed(weights)))
        if weights is None:
            return self._read(settings.weights)
        path = path_in(settings.weights_dir, weights)
        if not os.path.exists(path):  # Path.exists raises OSError if the name is too long
            raise BundleError(
                f"there is no bundle {weights[:64]!r} in --weights-dir {settings.weights_dir}; give the path of a bundle as seen from there"
            )
        return read_proven(path)

    def _read(self, weights: str) -> Bundle:
        return read_proven(model_path(self._settings, weights))

    def _allowed(self, weights: str) -> str:
        """The weights that an administrator names. Raises WeightsError if they are outside `--weights-dir`, or not a valid path."""
        if weights == "auto":
            raise WeightsError("auto is not allowed here, because it may choose random weights; name the weights")
        if "/" in weights or "\\" in weights or Path(weights).suffix.lower() in SUFFIXES:
            return str(path_in(self._settings.weights_dir, weights))
        return weights  # a name of torchvision or random:SEED; everything else is rejected when it is loaded


def _like(first: Bundle, bundle: Bundle) -> Bundle:
    """The bundle with the labels and the resizing of the first one, if it has as many classes and images of its size."""
    manifest, image = bundle.manifest, first.manifest.image
    if len(manifest.labels) == len(first.manifest.labels):
        manifest = structs.replace(manifest, labels=first.manifest.labels)
    if image is not None and manifest.image is not None and manifest.image.crop_size == image.crop_size:
        manifest = structs.replace(manifest, image=structs.replace(manifest.image, resize_size=image.resize_size))
    return replace(bundle, manifest=manifest)


def _served(bundle: Bundle, name: str = "") -> ServedModel:
    """The model, by this name if there is one. Raises BundleError if the rows of its inputs or outputs are too large."""
    manifest = bundle.manifest
    image = None if manifest.image is None else ImageSizes(manifest.image.resize_size, manifest.image.crop_size)
    try:
        return ServedModel(
            name or manifest.name,
            manifest.version,
            manifest.inputs,
            manifest.outputs,
            dict(manifest.dimensions),
            image,
            manifest.labels,
        )
    except ValueError as error:
        raise BundleError(f"{manifest.name} cannot be served: {error}") from error


def _shown(model: ServedModel, fields: list[str]) -> str:
    shown = []
    for field in fields:
        value = getattr(model, field)
        text = " and ".join(map(str, value)) if isinstance(value, tuple) else str(value or "")
        shown.append(f"{field} {text[:200] or 'none'}")
    return ", ".join(shown)
