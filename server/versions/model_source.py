"""Where the bundles of the versions of a model come from."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from multiworld_serving.common.config import check_memory
from multiworld_serving.models.bundle.files import Bundle, read_bundle, read_manifest
from multiworld_serving.models.bundle.manifest import Manifest
from multiworld_serving.models.errors import BundleError, WeightsError
from multiworld_serving.models.export.bundle_cache import exported
from multiworld_serving.models.weights import SUFFIXES
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.versions.model_files import bundle_path, check_model_files
from multiworld_serving.server.versions.stage_plan import stage_ends
from multiworld_serving.server.versions.weights_dir import path_in_weights_dir

_COPIES_OF_WEIGHTS = 4
"""Copies in memory while weights are exported: the file, its tensors, the module, the bundle."""


@dataclass(frozen=True)
class ModelSource:
    """Finds the bundle that `--model` names, or exports a model of torchvision into the cache."""

    settings: LeaderSettings

    def first(self) -> Bundle:
        """The version with which the service starts. Blocks.

        Raises:
            models.ModelError: it cannot be loaded, or does not fit the settings.
        """
        settings = self.settings
        check_model_files(settings)
        bundle = self._read(settings.weights)
        self._check_batch_size(bundle.manifest)
        return bundle

    def check(self) -> None:
        """Check that the first version has as many stages and as large batches as the settings ask for.

        Reads only the manifest, unless there are more stages than it was exported with. A .zip file is left to the leader.

        Raises:
            models.ModelError: it has not.
        """
        path = self._path(self.settings.weights)
        if path.is_dir():
            manifest = read_manifest(path)
            self._check_batch_size(manifest)
            if self.settings.stages > len(manifest.cuts) + 1:
                stage_ends(read_bundle(path), self.settings.stages)

    def _check_batch_size(self, manifest: Manifest) -> None:
        if self.settings.max_batch_size > manifest.max_batch_size:
            raise BundleError(
                f"{manifest.name} computes batches of at most {manifest.max_batch_size}; choose a smaller --max-batch-size, or export it "
                "with a larger one"
            )

    def version(self, weights: str | None, first: Bundle) -> Bundle:
        """A further version by the name that an administrator gives (None: that of the settings). Blocks.

        Labels and resizing of a model of torchvision stay those of the first version, because clients and frontends rely on them.

        Args:
            weights: of a model of torchvision: as `--weights`, with files below `--weights-dir`. Otherwise the path of a bundle below it.
        Raises:
            models.ModelError: it does not exist, is not allowed, or is invalid.
            MemoryError: there is not enough memory for another version.
        """
        settings = self.settings
        if bundle_path(settings) is None:
            check_memory(_COPIES_OF_WEIGHTS * first.graph.weights_bytes)
            return _like(first, self._read(settings.weights if weights is None else self._allowed(weights)))
        if weights is None:
            return self._read(settings.weights)
        path = path_in_weights_dir(settings.weights_dir, weights)
        if not os.path.exists(path):  # Path.exists raises OSError if the name is too long
            raise BundleError(
                f"there is no bundle {weights[:64]!r} in --weights-dir {settings.weights_dir}; give its path as seen from there"
            )
        return read_bundle(path)

    def _path(self, weights: str) -> Path:
        settings = self.settings
        return bundle_path(settings) or exported(
            settings.model, weights, settings.max_batch_size, image_size=settings.image_size
        )

    def _read(self, weights: str) -> Bundle:
        return read_bundle(self._path(weights))

    def _allowed(self, weights: str) -> str:
        """The weights that an administrator names. Raises WeightsError if they are outside `--weights-dir`, or not a valid path."""
        if weights == "auto":
            raise WeightsError("auto is not allowed here, because it may choose random weights; name the weights")
        if "/" in weights or "\\" in weights or Path(weights).suffix.lower() in SUFFIXES:
            return str(path_in_weights_dir(self.settings.weights_dir, weights))
        return weights  # a name of torchvision or random:SEED; everything else is rejected when it is loaded


def _like(first: Bundle, bundle: Bundle) -> Bundle:
    """The bundle with the labels and the resizing of the first one, if it has as many classes and images of its size."""
    manifest, image = bundle.manifest, first.manifest.image
    if len(manifest.labels) == len(first.manifest.labels):
        manifest = structs.replace(manifest, labels=first.manifest.labels)
    if image is not None and manifest.image is not None and manifest.image.crop_size == image.crop_size:
        manifest = structs.replace(manifest, image=structs.replace(manifest.image, resize_size=image.resize_size))
    return replace(bundle, manifest=manifest)
