"""Where further versions of the model come from: what an operator may name, and what a version must be to take the place of another."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from config import check_memory
from models import LoadedModel, WeightsError, load_model, same_cut
from server.plan import make_plan
from server.settings import ServeSettings
from server.versions import VersionPlan, Versions

logger = logging.getLogger(__name__)

_COPIES_OF_WEIGHTS = 4
"""At the same time, while a version is made: the file, its tensors, the module, the stages as they travel."""
_PATH_CHARACTERS = 1024


@dataclass(frozen=True)
class WeightsSource:
    """Implements `server.version_change.VersionSource`.

    An operator may name weights that torchvision publishes, "random:SEED", and files below one folder: not any file, for the token that
    restarts workers should not be one that reads the disk of the leader.

    Attributes:
        first: the model that the service began with. A version must have its architecture and number of classes; labels, image size
            and resizing stay as they are, because clients and the frontend rely on them.
    """

    settings: ServeSettings
    model: str
    num_classes: int
    crop_size: int
    resize_size: int

    @classmethod
    def beside(cls, first: LoadedModel, settings: ServeSettings) -> WeightsSource:
        """Versions that can take the place of `first`."""
        sizes = first.preprocessing
        return cls(settings, first.name, first.num_classes, sizes.crop_size, sizes.resize_size)

    def plan(self, weights: str | None, versions: Versions) -> VersionPlan:
        """See `VersionSource.plan`."""
        check_memory(_COPIES_OF_WEIGHTS * versions.current.weights_bytes)
        model = self._load(self.settings.weights if weights is None else self._allowed(weights))
        logger.info("version %s is loaded; cutting it into %d stages", model.version, len(versions.current.stages))
        if model.num_classes != self.num_classes:
            raise WeightsError(
                f"{model.version} has {model.num_classes} classes, and the service answers with {self.num_classes}; "
                "serve it as a service of its own"
            )
        if model.version == versions.current.version.name:
            return versions.current
        stages = versions.current.stages
        specs = [same_cut(plan.spec, model) for plan in stages]
        return VersionPlan.of(
            make_plan(model, len(stages), stages[0].tuning, versions.number_of(model.version), specs=specs)
        )

    def _load(self, weights: str) -> LoadedModel:
        return load_model(self.model, weights, image_size=self.crop_size, resize_size=self.resize_size)

    def _allowed(self, weights: str) -> str:
        """What `load_model` may be given for it.

        Raises:
            ModelError: it is a file elsewhere, or nothing that could be weights.
        """
        if weights == "auto":
            raise WeightsError("auto takes random weights where it finds no others; name the weights")
        if not self._is_path(weights):
            return weights  # a name, which leads nowhere but to torchvision; or nonsense, which load_model refuses
        folder = self.settings.weights_dir
        if folder is None:
            raise WeightsError(
                "files are loaded from --weights-dir only, and the service was started without it; name published weights or random:SEED"
            )
        if len(weights) > _PATH_CHARACTERS or "\0" in weights:
            raise WeightsError("that is no path of a file with weights")
        root = folder.resolve()
        try:
            found = (root / weights).resolve()
        except (OSError, RuntimeError) as error:  # a loop of links
            raise WeightsError(f"{weights[:64]!r} cannot be followed to a file") from error
        if not found.is_relative_to(root):
            raise WeightsError(f"{weights[:64]!r} is not below the service's --weights-dir; give a path within it")
        return str(found)

    def _is_path(self, weights: str) -> bool:
        return "/" in weights or "\\" in weights or Path(weights).suffix.lower() in (".pth", ".pt", ".safetensors")
