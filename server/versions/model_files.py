"""The files that the settings of a model name, checked without torch, so that the supervisor can do it before it starts a process."""

import os
from pathlib import Path

from multiworld_serving.models.errors import BundleError, LabelsError, WeightsError
from multiworld_serving.models.weights import SUFFIXES
from multiworld_serving.server.leader_settings import LeaderSettings


def check_model_files(settings: LeaderSettings) -> None:
    """Check that the files and folders exist. Reads none of them.

    Raises:
        models.ModelError: there is no such file or folder.
    """
    path = bundle_path(settings)
    if path is not None and not path.exists():
        raise BundleError(
            f"--model {settings.model}: there is no such file or folder; expected the path of a bundle that "
            "`multiworld export` wrote, or a name such as resnet50"
        )
    weights = Path(settings.weights)
    if path is None and weights.suffix.lower() in SUFFIXES and not weights.is_file():
        raise WeightsError(f"--weights {settings.weights}: there is no such file")
    if settings.labels is not None and not Path(settings.labels).is_file():
        raise LabelsError(f"--labels {settings.labels}: there is no such file")
    if settings.weights_dir is not None and not settings.weights_dir.is_dir():
        raise WeightsError(f"--weights-dir {settings.weights_dir}: there is no such folder")


def bundle_path(settings: LeaderSettings) -> Path | None:
    """The bundle that `--model` names by its path; None if it is the name of a model."""
    path = Path(settings.model)
    return path if path.exists() or os.sep in settings.model or path.suffix else None
