"""Opens the model that is served, and loads further versions of it with the same interface."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from multiworld_serving.models.bundle.files import Bundle
from multiworld_serving.models.errors import BundleError
from multiworld_serving.models.optimize.tuning import Tuning
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.predictor import ImageSizes, ModelVersion, ServedModel
from multiworld_serving.server.versions.model_source import ModelSource
from multiworld_serving.server.versions.stage_plan import make_bundle_plan
from multiworld_serving.server.versions.version_table import VersionPlan, VersionTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BundleLoader:
    """Loads versions with the interface of the first one."""

    source: ModelSource
    first: Bundle

    def load(self, weights: str | None, versions: VersionTable) -> VersionPlan:
        """Load, check and partition a version (None: that of the settings). Blocks.

        Raises:
            models.ModelError: there is no such version, it is not allowed, invalid, or has another interface.
            MemoryError: there is not enough memory for another version.
        """
        bundle = self.source.version(weights, self.first)
        manifest, stages = bundle.manifest, versions.current.stages
        logger.info("version %s is loaded; splitting it into %d stages", manifest.version, len(stages))
        expected, found = _interface(self.first), _interface(bundle)
        if changed := [field for field, value in expected.items() if found[field] != value]:
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
        version = ModelVersion(versions.number_of(manifest.version), manifest.version)
        return VersionPlan(version, make_bundle_plan(bundle, len(stages), stages[0].tuning, version.number), digest)


def open_model(settings: LeaderSettings, tuning: Tuning) -> tuple[ServedModel, BundleLoader, VersionPlan]:
    """What is needed to serve the model of the settings. Blocks: loads, reads and hashes its weights.

    Raises:
        models.ModelError: there is no such model, or it cannot be cut into this many stages.
    """
    source = ModelSource(settings)
    first = source.first()
    manifest = first.manifest
    logger.debug("partitioning %s@%s into %d stages", manifest.name, manifest.version, settings.stages)
    plan = VersionPlan(
        ModelVersion(1, manifest.version), make_bundle_plan(first, settings.stages, tuning), first.digest
    )
    return _served(first), BundleLoader(source, first), plan


def _served(bundle: Bundle) -> ServedModel:
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
            manifest.labels,
        )
    except ValueError as error:
        raise BundleError(f"{manifest.name} cannot be served: {error}") from error


def _interface(bundle: Bundle) -> dict[str, object]:
    """What clients rely on, by name."""
    manifest = bundle.manifest
    image = manifest.image
    return {
        "inputs": manifest.inputs,
        "outputs": manifest.outputs,
        "dimensions": {name: tuple(bounds) for name, bounds in manifest.dimensions.items()},
        "preprocessing": None if image is None else (image.resize_size, image.crop_size),
        "labels": manifest.labels,
    }


def _shown(interface: dict[str, object], fields: list[str]) -> str:
    shown = []
    for field in fields:
        value = interface[field]
        text = " and ".join(map(str, value)) if isinstance(value, tuple) else str(value or "")
        shown.append(f"{field} {text[:200] or 'none'}")
    return ", ".join(shown)
