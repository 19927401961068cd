"""A new `multiworld serve` replaces a running one without an outage: with new code, new settings, and the same process id.

On SIGUSR2, the supervisor starts its command line again. This successor inherits the listening sockets and starts leaders, workers and
frontends of its own. Its frontends accept connections when all of its models are ready. Then the predecessor stops its processes as on
SIGTERM, and executes `forwarder.py`. If the successor ends before it is ready, the predecessor continues as if nothing had happened.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, Self

from multiworld_serving.common.config.process import exit_with_parent
from multiworld_serving.deploy.processes import forwarder
from multiworld_serving.deploy.processes.child_process import ChildProcess, status_text

logger = logging.getLogger(__name__)

_VARIABLE = "SUPERVISOR_STATE"
"""In the environment of a successor: a JSON object with the arguments of `Predecessor`."""
_READY = "ready"
"""Name of the pipe into which the successor writes when it serves."""
_START_TIMEOUT_S = 900.0
"""Enough to export a large model."""


class Predecessor:
    """The service that this process replaces.

    Args:
        fds: inherited descriptors by name.
        changes: of its models by commands; see `Models`.
    """

    def __init__(self, fds: dict[str, int], changes: dict[str, Any]) -> None:
        self._fds = fds
        self.changes = changes
        for fd in fds.values():
            os.set_inheritable(fd, False)

    @classmethod
    def of_environment(cls) -> Self | None:
        """The service that has started this process as its successor; None if none has. Raises SystemExit if it has ended."""
        if (given := os.environ.pop(_VARIABLE, None)) is None:
            return None
        exit_with_parent()
        return cls(**json.loads(given))

    def socket(self, name: str) -> socket.socket | None:
        """Its socket of this name; None if it has none."""
        return None if (fd := self._fds.pop(name, None)) is None else socket.socket(fileno=fd)

    def replace(self) -> None:
        """This process serves: the predecessor stops. Its sockets that this process does not use are closed."""
        with contextlib.suppress(OSError):  # it has ended, and the kernel ends this process too
            os.write(self._fds[_READY], b"1")
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


async def start_successor(sockets: Mapping[str, socket.socket], changes: Mapping[str, object]) -> ChildProcess | None:
    """Start the command line of this process again, and wait until the new process serves.

    Args:
        sockets: by name; the new process inherits them.
        changes: of the models; the new process makes them too.
    Returns:
        The new process. None if it could not be started, has ended, or was not ready in time: the log says why.
    """
    reader, writer = os.pipe()
    fds = {**{name: sock.fileno() for name, sock in sockets.items()}, _READY: writer}
    environment = {**os.environ, _VARIABLE: json.dumps({"fds": fds, "changes": changes})}
    environment.pop("WATCHDOG_PID", None)  # of systemd, for this process
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        try:
            child = ChildProcess.spawn([sys.executable, *sys.orig_argv[1:]], environment, list(fds.values()))
        except OSError as error:
            logger.error("the upgrade failed: the new process cannot be started: %s", error)  # noqa: TRY400
            return None
        finally:
            os.close(writer)
        logger.info("upgrading: the new supervisor starts pid=%d", child.pid)
        serves = False
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_START_TIMEOUT_S):
                    await _readable(reader)
                    serves = pipe.read(1) != b""  # end of file: it has ended
        finally:
            if not serves:
                status = status_text(child.reap())
                logger.error("the upgrade failed: the new supervisor ended status=%s; this service continues", status)
    return child if serves else None


async def _readable(fd: int) -> None:
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(fd)


def hold_signals() -> None:
    """From now on, signals wait for the program that `become_forwarder` executes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarder.SIGNALS)


def become_forwarder(successor: ChildProcess) -> NoReturn:
    """Replace this process by a program that forwards signals to the successor and exits when it exits. Call `hold_signals` first."""
    os.execv(sys.executable, [sys.executable, "-I", forwarder.__file__, str(successor.pid)])  # noqa: S606
