"""Where the model comes from: a built-in ResNet, a bundle, or another model of torchvision."""

from __future__ import annotations

import os
from pathlib import Path

from multiworld_serving.models import MODEL_NAMES, BundleError, LabelsError, StageError, WeightsError, block_names
from multiworld_serving.models.weights.checkpoints import SUFFIXES
from multiworld_serving.server.leader_settings import LeaderSettings


def check_model_source(settings: LeaderSettings) -> None:
    """Check what these settings name, without loading it.

    Raises:
        models.ModelError: there is no such model or file, or it has fewer blocks than stages.
    """
    if (path := bundle_path(settings)) is not None:
        if not path.exists():
            raise BundleError(
                f"--model {settings.model}: there is no such file or folder; expected the path of a bundle that "
                "`multiworld export` wrote, or a name such as resnet50"
            )
        return
    if Path(settings.weights).suffix.lower() in SUFFIXES and not Path(settings.weights).is_file():
        raise WeightsError(f"--weights {settings.weights}: there is no such file")
    if settings.labels is not None and not Path(settings.labels).is_file():
        raise LabelsError(f"--labels {settings.labels}: there is no such file")
    if settings.model not in MODEL_NAMES:
        # Importing it takes a second.
        from multiworld_serving.models.export.published import check_name  # noqa: PLC0415

        check_name(settings.model)
    elif settings.stages > (count := len(block_names(settings.model))):
        raise StageError(
            f"--stages {settings.stages}: {settings.model} has {count} blocks; expected 1 to {count} stages"
        )


def bundle_path(settings: LeaderSettings) -> Path | None:
    """The bundle that `--model` names by its path; None if it is the name of a model."""
    path = Path(settings.model)
    return path if path.exists() or os.sep in settings.model or path.suffix else None
