"""Serves a bundle: its stages, and other bundles of the same interface as further versions."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from multiworld_serving.models import Bundle, BundleError, Tuning, read_bundle
from multiworld_serving.models.weights.labels import read_labels
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.predictor import ImageSizes, ServedModel
from multiworld_serving.server.versions.stage_plan import make_bundle_plan
from multiworld_serving.server.versions.version_table import VersionPlan, VersionTable
from multiworld_serving.server.versions.weights_dir import path_in_weights_dir

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BundleLoader:
    """Loads bundles with the interface of the first one: by the path below `--weights-dir` that an administrator gives.

    Attributes:
        interface: inputs, outputs, dimensions, preprocessing and labels that a version must have.
    """

    settings: LeaderSettings
    path: Path
    interface: dict[str, object]

    def load(self, weights: str | None, versions: VersionTable) -> VersionPlan:
        """Read, check and partition a bundle (None: that of the settings). Blocks.

        Raises:
            models.ModelError: there is no such bundle, it is not allowed, invalid, or has another interface.
        """
        path = self.path if weights is None else path_in_weights_dir(self.settings.weights_dir, weights)
        bundle = read_bundle(path)
        found, stages = _interface(bundle, self.settings), versions.current.stages
        if changed := [field for field, value in self.interface.items() if found[field] != value]:
            raise BundleError(
                f"{bundle.manifest.name}@{bundle.manifest.version} has other {' and '.join(changed)} than the service: "
                f"{_shown(self.interface, changed)}, but the bundle has {_shown(found, changed)}; serve it as a separate service"
            )
        if bundle.manifest.version == versions.current.version.name:
            return versions.current
        number = versions.number_of(bundle.manifest.version)
        return VersionPlan.of(make_bundle_plan(bundle, len(stages), stages[0].tuning, number))


def open_bundle(path: Path, settings: LeaderSettings, tuning: Tuning) -> tuple[ServedModel, BundleLoader, VersionPlan]:
    """What is needed to serve a bundle. Blocks: reads and hashes its weights.

    Raises:
        models.ModelError: it is not a bundle, or cannot be cut into this many stages.
    """
    bundle = read_bundle(path)
    manifest = bundle.manifest
    logger.debug("partitioning %s@%s into %d stages", manifest.name, manifest.version, settings.stages)
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
    served = _served(bundle, settings)
    plan = VersionPlan.of(make_bundle_plan(bundle, settings.stages, tuning))
    return served, BundleLoader(settings, path, _interface(bundle, settings)), plan


def _served(bundle: Bundle, settings: LeaderSettings) -> ServedModel:
    """Raises BundleError if the rows of its inputs or outputs are too large."""
    manifest = bundle.manifest
    image = None if manifest.image is None else ImageSizes(manifest.image.resize_size, manifest.image.crop_size)
    try:
        return ServedModel(
            manifest.name,
            manifest.version,
            manifest.inputs,
            manifest.outputs,
            dict(manifest.dimensions),
            image,
            _labels(bundle, settings),
        )
    except ValueError as error:
        raise BundleError(f"{manifest.name} cannot be served: {error}") from error


def _labels(bundle: Bundle, settings: LeaderSettings) -> tuple[str, ...]:
    labels = bundle.manifest.labels
    if settings.labels is None:
        return labels
    if not labels:
        raise BundleError(f"{bundle.manifest.name} has no classes; leave --labels out, or export it with labels")
    return read_labels(settings.labels, len(labels))


def _interface(bundle: Bundle, settings: LeaderSettings) -> dict[str, object]:
    """What clients rely on, by name."""
    manifest = bundle.manifest
    image = manifest.image
    return {
        "inputs": manifest.inputs,
        "outputs": manifest.outputs,
        "dimensions": {name: tuple(bounds) for name, bounds in manifest.dimensions.items()},
        "preprocessing": None if image is None else (image.resize_size, image.crop_size),
        "labels": _labels(bundle, settings),
    }


def _shown(interface: dict[str, object], fields: list[str]) -> str:
    return ", ".join(f"{field} {str(interface[field])[:200]}" for field in fields)
