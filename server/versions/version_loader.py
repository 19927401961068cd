"""Loads further versions of the model: which weights an administrator may name, and what a version must match."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from multiworld_serving.common.config import check_memory
from multiworld_serving.models import LoadedModel, StageSpec, WeightsError, load_model, respecify
from multiworld_serving.models.weights.checkpoints import SUFFIXES
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.versions.stage_plan import make_plan
from multiworld_serving.server.versions.version_table import VersionPlan, VersionTable
from multiworld_serving.server.versions.weights_dir import path_in_weights_dir

logger = logging.getLogger(__name__)

_COPIES_OF_WEIGHTS = 4
"""Copies in memory while a version is loaded: the file, its tensors, the module, the serialized stages."""


@dataclass(frozen=True)
class VersionLoader:
    """Loads versions by the name that an administrator gives.

    Allowed are weights published by torchvision, "random:SEED", and files below `--weights-dir`.

    Attributes:
        model, num_classes: architecture and number of classes that a version must have.
        crop_size, resize_size: preprocessing of the first version in pixels. It is kept, because clients and the frontend rely on it.
        specs: its partition.
    """

    settings: LeaderSettings
    model: str
    num_classes: int
    crop_size: int
    resize_size: int
    specs: tuple[StageSpec, ...]

    @classmethod
    def compatible_with(cls, first: LoadedModel, specs: Sequence[StageSpec], settings: LeaderSettings) -> VersionLoader:
        """The loader of versions that can replace `first`, partitioned as `specs`."""
        sizes = first.preprocessing
        return cls(settings, first.name, first.num_classes, sizes.crop_size, sizes.resize_size, tuple(specs))

    def load(self, weights: str | None, versions: VersionTable) -> VersionPlan:
        """Load and check the weights (None: those of the settings), and partition the model. Blocks.

        Raises:
            models.ModelError: the weights do not exist, are not allowed, or are invalid.
            MemoryError: there is not enough memory for another version.
        """
        check_memory(_COPIES_OF_WEIGHTS * versions.current.weights_bytes)
        model = self._load(self.settings.weights if weights is None else self._allowed(weights))
        logger.info("version %s is loaded; splitting it into %d stages", model.version, len(versions.current.stages))
        if model.num_classes != self.num_classes:
            raise WeightsError(
                f"{model.version} has {model.num_classes} classes, but the service has {self.num_classes}; serve it as a separate service"
            )
        if model.version == versions.current.version.name:
            return versions.current
        number = versions.number_of(model.version)
        specs = [respecify(spec, model) for spec in self.specs]
        return VersionPlan.of(make_plan(model, len(specs), versions.current.stages[0].tuning, number, specs=specs))

    def _load(self, weights: str) -> LoadedModel:
        return load_model(
            self.model,
            weights,
            image_size=self.crop_size,
            resize_size=self.resize_size,
            mean=self.settings.channel_means,
            std=self.settings.channel_stds,
        )

    def _allowed(self, weights: str) -> str:
        """The argument for `load_model`.

        Raises:
            ModelError: it is a path outside `--weights-dir`, or not a valid path.
        """
        if weights == "auto":
            raise WeightsError("auto is not allowed here, because it may choose random weights; name the weights")
        if not self._is_path(weights):
            return weights  # a torchvision name or random:SEED; load_model rejects everything else
        return str(path_in_weights_dir(self.settings.weights_dir, weights))

    def _is_path(self, weights: str) -> bool:
        return "/" in weights or "\\" in weights or Path(weights).suffix.lower() in SUFFIXES
