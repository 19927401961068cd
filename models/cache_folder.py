"""The folder for bundles of torchvision models and for compiled kernels. Imports no torch."""

import contextlib
import os
import stat
from pathlib import Path

from multiworld_serving.models.errors import ExportError


def cache_folder(name: str) -> Path:
    """The folder of this user for what is cached under this name. No other user can change what it contains.

    Raises:
        ExportError: it cannot be made, or another user can change it.
    """
    if cache := os.environ.get("XDG_CACHE_HOME"):
        folder = Path(cache) / "multiworld"
    elif home := os.environ.get("HOME"):
        folder = Path(home) / ".cache" / "multiworld"
    else:
        folder = Path(os.environ.get("TMPDIR") or "/tmp") / f"multiworld-{os.geteuid()}"  # noqa: S108 - it is checked
    try:
        return _private(folder) / name
    except OSError as error:
        reason = str(error) if error.errno is None else error.strerror
        raise ExportError(f"cannot cache in {folder}: {reason}; set XDG_CACHE_HOME to a writable folder") from error


def _private(folder: Path) -> Path:
    """Make this folder with mode 0700, or check that no other user can change what it contains. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        raise PermissionError(
            f"{folder} is not a folder that only this user can change; delete it, or set its mode to 0700"
        )
    return folder
