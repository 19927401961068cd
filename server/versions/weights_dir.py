"""Files that an administrator may load: those below `--weights-dir`, so that the admin token does not grant access to the leader's disk."""

from __future__ import annotations

from pathlib import Path

from multiworld_serving.models.errors import WeightsError

_PATH_CHARACTERS = 1024


def path_in_weights_dir(folder: Path | None, text: str) -> Path:
    """The path that an administrator names.

    Raises:
        WeightsError: it is outside `folder`, or not a valid path, or there is no folder.
    """
    if folder is None:
        raise WeightsError(
            "files and bundles are loaded from --weights-dir only, but the service was started without it; "
            "start it with --weights-dir FOLDER, or name published weights or random:SEED"
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
