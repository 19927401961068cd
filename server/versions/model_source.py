"""Where versions of the model come from: weights of a model of torchvision, or bundles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from multiworld_serving.common.config import check_memory
from multiworld_serving.models import (
    MODEL_NAMES,
    Bundle,
    BundleError,
    LoadedModel,
    StageError,
    WeightsError,
    classifier_bundle,
    count_blocks,
    load_model,
    read_bundle,
)
from multiworld_serving.models.weights import SUFFIXES
from multiworld_serving.models.weights.labels import read_labels
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.versions.model_files import bundle_path, check_model_files
from multiworld_serving.server.versions.weights_dir import path_in_weights_dir

_COPIES_OF_WEIGHTS = 4
"""Copies in memory while weights are loaded: the file, its tensors, the module, the bundle's file."""


class ModelSource(Protocol):
    """Makes bundles of the versions of a model. All of them have the labels of the service."""

    def first(self) -> Bundle:
        """The version with which the service starts. Blocks.

        Raises:
            models.ModelError: it cannot be loaded, or does not fit the settings.
        """
        ...

    def version(self, weights: str | None, first: Bundle) -> Bundle:
        """A further version by the name that an administrator gives (None: that of the settings). Blocks.

        Raises:
            models.ModelError: it does not exist, is not allowed, or is invalid.
            MemoryError: there is not enough memory for another version.
        """
        ...


def source_of(settings: LeaderSettings) -> ModelSource:
    """The source of the model that the settings name.

    Raises:
        models.ModelError: there is no such model.
    """
    check_model_source(settings)
    if settings.model in MODEL_NAMES:
        return ResNetSource(settings)
    if (path := bundle_path(settings)) is not None:
        return BundleSource(settings, path)
    return PublishedSource(settings)


def check_model_source(settings: LeaderSettings) -> None:
    """Check what these settings name, without loading it.

    Raises:
        models.ModelError: there is no such model or file, or it has fewer blocks than stages.
    """
    check_model_files(settings)
    if bundle_path(settings) is not None:
        return
    if settings.model not in MODEL_NAMES:
        # Importing it takes a second.
        from multiworld_serving.models.export.published import check_name  # noqa: PLC0415

        check_name(settings.model)
    elif settings.stages > (count := count_blocks(settings.model)):
        raise StageError(
            f"--stages {settings.stages}: {settings.model} has {count} blocks; expected 1 to {count} stages"
        )


@dataclass(frozen=True)
class ResNetSource:
    """ResNets, which become bundles in memory.

    Weights published by torchvision, "random:SEED", and files; later versions only from files below `--weights-dir`.
    """

    settings: LeaderSettings

    def first(self) -> Bundle:
        """See `ModelSource`."""
        settings = self.settings
        model = load_model(
            settings.model,
            settings.weights,
            labels=settings.labels,
            image_size=settings.image_size,
            mean=settings.channel_means,
            std=settings.channel_stds,
        )
        return classifier_bundle(model, settings.max_batch_size)

    def version(self, weights: str | None, first: Bundle) -> Bundle:
        """See `ModelSource`. Sizes of images stay those of the first version, because clients and frontends rely on them."""
        image, labels = first.manifest.image, first.manifest.labels
        assert image is not None
        check_memory(_COPIES_OF_WEIGHTS * first.weights_bytes)
        model = load_model(
            self.settings.model,
            self.settings.weights if weights is None else _allowed(self.settings, weights),
            image_size=image.crop_size,
            resize_size=image.resize_size,
            mean=self.settings.channel_means,
            std=self.settings.channel_stds,
        )
        _check_classes(model.version, model.labels, labels)
        labelled = LoadedModel(model.name, model.version, model.module, labels, model.preprocessing)
        return classifier_bundle(labelled, first.manifest.max_batch_size)


@dataclass(frozen=True)
class PublishedSource:
    """Other models of torchvision, exported into a cache, with the same weights as ResNets. Loading may take minutes."""

    settings: LeaderSettings

    def first(self) -> Bundle:
        """See `ModelSource`."""
        settings = self.settings
        bundle = self._exported(settings.weights, image_size=settings.image_size)
        return bundle if settings.labels is None else _with_labels(bundle, settings.labels)

    def version(self, weights: str | None, first: Bundle) -> Bundle:
        """See `ModelSource`. Sizes of images and labels stay those of the first version."""
        image = first.manifest.image
        assert image is not None
        check_memory(_COPIES_OF_WEIGHTS * first.weights_bytes)
        bundle = self._exported(
            self.settings.weights if weights is None else _allowed(self.settings, weights),
            image_size=image.crop_size,
            resize_size=image.resize_size,
        )
        manifest, labels = bundle.manifest, first.manifest.labels
        _check_classes(manifest.version, manifest.labels, labels)
        return replace(bundle, manifest=replace(manifest, labels=labels))

    def _exported(self, weights: str, **sizes: int | None) -> Bundle:
        # Importing it takes a second.
        from multiworld_serving.models.export.published import PublishedModel, exported  # noqa: PLC0415

        model = PublishedModel.choose(
            self.settings.model,
            weights,
            max_batch_size=self.settings.max_batch_size,
            mean=self.settings.channel_means,
            std=self.settings.channel_stds,
            **sizes,
        )
        return read_bundle(exported(model))


@dataclass(frozen=True)
class BundleSource:
    """Bundles; later versions by their path below `--weights-dir`."""

    settings: LeaderSettings
    path: Path

    def first(self) -> Bundle:
        """See `ModelSource`."""
        bundle, settings = self._read(self.path), self.settings
        manifest = bundle.manifest
        if settings.max_batch_size > manifest.max_batch_size:
            raise BundleError(
                f"{manifest.name} computes batches of at most {manifest.max_batch_size}; choose a smaller --max-batch-size, or export it "
                "with a larger one"
            )
        for option in ("image_size", "mean", "std"):
            if getattr(settings, option) is not None:
                raise BundleError(
                    f"--{option.replace('_', '-')} is decided when a bundle is made: export it with another one"
                )
        return bundle

    def version(self, weights: str | None, first: Bundle) -> Bundle:
        """See `ModelSource`."""
        if weights is None:
            return self._read(self.path)
        path = path_in_weights_dir(self.settings.weights_dir, weights)
        if not os.path.exists(path):  # Path.exists raises OSError if the name is too long
            raise BundleError(
                f"there is no bundle {weights[:64]!r} in --weights-dir {self.settings.weights_dir}; give its path as seen from there"
            )
        return self._read(path)

    def _read(self, path: Path) -> Bundle:
        bundle = read_bundle(path)
        return bundle if self.settings.labels is None else _with_labels(bundle, self.settings.labels)


def _with_labels(bundle: Bundle, file: str) -> Bundle:
    manifest = bundle.manifest
    if not manifest.labels:
        raise BundleError(f"{manifest.name} has no classes; leave --labels out, or export it with labels")
    return replace(bundle, manifest=replace(manifest, labels=read_labels(file, len(manifest.labels))))


def _check_classes(version: str, found: Sequence[str], labels: Sequence[str]) -> None:
    if len(found) != len(labels):
        raise WeightsError(
            f"{version} has {len(found)} classes, but the service has {len(labels)}; serve it as a separate service"
        )


def _allowed(settings: LeaderSettings, weights: str) -> str:
    """The weights that an administrator names, as a model's source takes them.

    Raises:
        ModelError: it is a path outside `--weights-dir`, or not a valid path.
    """
    if weights == "auto":
        raise WeightsError("auto is not allowed here, because it may choose random weights; name the weights")
    if "/" in weights or "\\" in weights or Path(weights).suffix.lower() in SUFFIXES:
        return str(path_in_weights_dir(settings.weights_dir, weights))
    return weights  # a name of torchvision or random:SEED; everything else is rejected when it is loaded
