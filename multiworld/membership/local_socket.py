"""The Unix socket on which a process accepts data connections from members on its host.

It lies in a folder of this user with mode 0700. The file of a killed process is deleted by the next one that opens a socket there.
"""

import contextlib
import os
import socket
import stat
import time
from pathlib import Path

from multiworld.membership.acceptor import listen_on

_STARTED_S = 60.0
"""Age of a socket file from which on its process must listen on it if it is alive."""
_MAX_FOLDER_BYTES = 107 - len("/multiworld-4294967295/01234567-0123456789abcdef")
"""The address of a Unix socket has at most 107 bytes."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def default_runtime_dir() -> str:
    """The folder for Unix sockets: MULTIWORLD_RUNTIME_DIR; else the first whose path is short enough of XDG_RUNTIME_DIR, TMPDIR, and
    /tmp. It may not exist.
    """
    if chosen := os.environ.get("MULTIWORLD_RUNTIME_DIR"):
        return chosen
    folders = (os.environ.get("XDG_RUNTIME_DIR", ""), os.environ.get("TMPDIR", ""))
    return next((folder for folder in folders if 0 < len(os.fsencode(folder)) <= _MAX_FOLDER_BYTES), "/tmp")  # noqa: S108


def bind_local(runtime_dir: str) -> socket.socket:
    """Return a non-blocking socket that listens at a new path in the folder of this user under `runtime_dir`.

    Raises OSError, also when the folder is not private or the path is longer than a Unix socket allows.
    """
    folder = Path(runtime_dir) / f"multiworld-{os.geteuid()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not a folder of mode 0700 of this user")
    # Under another kernel, which may share the folder through a network file system, a live socket looks abandoned.
    boot = _BOOT_ID.read_text()[:8]
    _delete_abandoned(folder, boot)
    return listen_on(str(folder / f"{boot}-{os.urandom(8).hex()}"))


def _delete_abandoned(folder: Path, boot: str) -> None:
    """Delete the sockets of this boot that no process listens on."""
    for path in folder.glob(f"{boot}-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime < _STARTED_S:
                continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
