"""The listening sockets of a process, each shared by many worlds.

Members on its host open data connections on a Unix socket. It lies in a folder of this user with mode 0700. The file of a killed process is
deleted by the next one that opens a socket there.
"""

import asyncio
import contextlib
import functools
import logging
import os
import socket
import stat
import time
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path

from multiworld.config import WorldConfig
from multiworld.control.dial import resolve
from multiworld.control.loop import ControlLoop
from multiworld.errors import JoinError
from multiworld.membership.acceptor import Acceptor, listen_on

logger = logging.getLogger(__name__)

_STARTED_S = 60.0
"""Age of a socket file from which on its process must listen on it if it is alive."""
_MAX_FOLDER_BYTES = 107 - len("/multiworld-4294967295/01234567-0123456789abcdef")
"""The address of a Unix socket has at most 107 bytes."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Listeners:
    """Opens acceptors on first use. The caller serialises the calls.

    Attributes:
        secrets: new clients must know one of these. Shared with all acceptors.
        acceptors: by IP address and port. That of the Unix socket by its folder and 0.

    Args:
        runtime_dir: the folder of the Unix socket; empty for none.
    """

    def __init__(self, secret: bytes, runtime_dir: str) -> None:
        self.secrets = [secret]
        self.acceptors: dict[tuple[str, int], Acceptor] = {}
        self._runtime_dir = runtime_dir

    def open(self, control_loop: ControlLoop, host: str, port: int, sock: socket.socket | None = None) -> Acceptor:
        """Return the acceptor on an IP address and port; open it if necessary, on `sock` if not None. Raises OSError."""
        acceptor = self.acceptors.get((host, port))
        if acceptor is None:
            acceptor = self._accept_on(control_loop, lambda: sock or listen_on((host, port)))
            self.acceptors[host, acceptor.port] = acceptor
        return acceptor

    def open_local(self, control_loop: ControlLoop) -> Acceptor | None:
        """Return the acceptor of members on this host, on a Unix socket; open it if necessary. None if that failed once."""
        acceptor = self.acceptors.get((self._runtime_dir, 0))
        if acceptor is None and self._runtime_dir:
            try:
                acceptor = self._accept_on(control_loop, partial(bind_local, self._runtime_dir))
            except OSError as error:
                logger.warning("members on this host use TCP: no Unix socket in %s: %s", self._runtime_dir, error)
                self._runtime_dir = ""
            else:
                self.acceptors[self._runtime_dir, 0] = acceptor
                acceptor.keep_open = True
        return acceptor

    def _accept_on(self, control_loop: ControlLoop, listening: Callable[[], socket.socket]) -> Acceptor:
        acceptor = Acceptor(control_loop, listening(), self.secrets)
        control_loop.call_soon(acceptor.open)
        return acceptor

    def close_unused(self, used: Set[Acceptor | None]) -> None:
        """Close the acceptors that no world uses, on the thread of the control loop."""
        for key, acceptor in list(self.acceptors.items()):
            if acceptor not in used and not acceptor.keep_open:
                self.acceptors.pop(key).close()

    def clear(self) -> list[Acceptor]:
        """Forget all acceptors. Returns them; the caller closes them."""
        acceptors, self.acceptors = [*self.acceptors.values()], {}
        return acceptors


async def listening_address(config: WorldConfig) -> str:
    """Return the IP address on which rank 0 listens. Raises JoinError after the time that forming the world may take, and OSError."""
    try:
        async with asyncio.timeout(config.timeout_s):
            return (await resolve(config.addr))[0]
    except TimeoutError:
        raise JoinError(config.name, f"{config.addr} was not resolved within {config.timeout_s:g} s") from None


def listening_host(addr: str) -> str:
    """Return the address to bind for `addr`. An IP address is returned as it is; a name is resolved, which may block. Raises OSError."""
    return str(socket.getaddrinfo(addr, None, type=socket.SOCK_STREAM)[0][4][0])


def default_runtime_dir() -> str:
    """Return the folder for Unix sockets: MULTIWORLD_RUNTIME_DIR; else the first whose path is short enough of XDG_RUNTIME_DIR, TMPDIR, and
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
    return listen_on(str(folder / f"{_delete_abandoned(folder)}-{os.urandom(8).hex()}"))


@functools.cache  # once in each process, because every socket of another process is tried
def _delete_abandoned(folder: Path) -> str:
    """Delete the sockets of this boot that no process listens on. Returns the prefix of their names."""
    # Under another kernel, which may share the folder through a network file system, a live socket looks abandoned.
    boot = _BOOT_ID.read_text()[:8]
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
    return boot
