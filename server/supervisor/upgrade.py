"""A new `multiworld serve` replaces a running one without an outage: with new code, new settings, and the same process id.

On request of `multiworld upgrade`, or on SIGUSR2, the supervisor starts its command line again. This successor inherits the listening
sockets and starts leaders, workers and frontends of its own. Its frontends accept connections when all of its models are ready. Then the
predecessor stops its processes as on SIGTERM, and executes `forwarder.py`. If the successor ends before it is ready, or is not ready in
time, the predecessor continues as if nothing had happened.
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
from typing import Any

from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.process import exit_with_parent
from multiworld_serving.common.config.sources import option
from multiworld_serving.common.http.listener import bind
from multiworld_serving.server.supervisor import forwarder
from multiworld_serving.server.supervisor.child_process import ChildProcess, readable, status_text
from multiworld_serving.server.supervisor.programs import START_TIMEOUT_S

logger = logging.getLogger(__name__)

_VARIABLE = "SUPERVISOR_STATE"
"""In the environment of a successor: the inherited descriptors by name, and the changes of models, as JSON."""
_READY = "ready"
"""Name of the pipe into which the successor writes when it serves."""


class Upgrade:
    """Both ends of an upgrade: this process may be the successor of another one, and may have a successor.

    Args:
        stack: closes the listening sockets.
    Raises:
        SystemExit: the predecessor has ended.

    Attributes:
        replaces: whether this process is a successor, until `replace`.
        changes: of the predecessor's models by commands; see `Models`.
        successor: the process that serves instead of this one.
    """

    def __init__(self, stack: contextlib.ExitStack) -> None:
        given = json.loads(os.environ.pop(_VARIABLE, "{}"))
        self._fds: dict[str, int] = given.get("fds", {})
        self.changes: dict[str, Any] = given.get("changes", {})
        self.replaces = bool(given)
        self.successor: ChildProcess | None = None
        self._sockets: dict[str, socket.socket] = {}
        self._stack = stack
        if given:
            exit_with_parent()
        for fd in self._fds.values():
            os.set_inheritable(fd, False)

    def listen(self, setting: str, host: str, port: int, *, reserve: bool = False) -> socket.socket:
        """A listening socket, which a successor inherits: that of the predecessor, or a new one. Raises UserError; see `bind`."""
        key = f"{setting} {host}:{port}"
        fd = self._fds.pop(key, None)
        made = bind(host, port, option(setting), reserve=reserve) if fd is None else socket.socket(fileno=fd)
        self._sockets[key] = self._stack.enter_context(made)
        return made

    def replace(self) -> None:
        """This process serves: the predecessor stops. Its sockets that this process does not use are closed."""
        self.replaces = False
        with contextlib.suppress(OSError):  # it has ended, and the kernel ends this process too
            os.write(self._fds[_READY], b"1")
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    async def start_successor(self, changes: Mapping[str, object]) -> ChildProcess:
        """Start the command line of this process again, and wait until the new process serves.

        Args:
            changes: of the models; the new process makes them too.
        Returns:
            The new process.
        Raises:
            UserError: it could not be started, has ended, or was not ready in time.
        """
        reader, writer = os.pipe()
        fds = {**{name: sock.fileno() for name, sock in self._sockets.items()}, _READY: writer}
        environment = {**os.environ, _VARIABLE: json.dumps({"fds": fds, "changes": changes})}
        environment.pop("WATCHDOG_PID", None)  # of systemd, for this process
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            try:
                child = ChildProcess.spawn([sys.executable, *sys.orig_argv[1:]], environment, list(fds.values()))
            except OSError as error:
                raise UserError(f"the new supervisor cannot be started: {error}") from error
            finally:
                os.close(writer)
            logger.info("upgrading: the new supervisor starts pid=%d", child.pid)
            why = "ended"
            try:
                async with asyncio.timeout(START_TIMEOUT_S):
                    await readable(reader)
                if pipe.read(1):  # otherwise it has ended
                    self.successor = child
            except TimeoutError:
                why = f"was not ready within {START_TIMEOUT_S:g} s and was killed"
            finally:
                status = "" if self.successor is not None else status_text(child.reap())
        if self.successor is None:
            raise UserError(f"the new supervisor {why} status={status}; its log says more")
        return self.successor

    def become_forwarder(self) -> None:
        """If there is a successor, replace this process by a program that forwards signals to it and exits when it exits."""
        if self.successor is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, forwarder.SIGNALS)  # until that program handles them
            os.execv(sys.executable, [sys.executable, "-I", forwarder.__file__, str(self.successor.pid)])  # noqa: S606
