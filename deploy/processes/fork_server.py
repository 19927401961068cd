"""A process that imports what workers need once, and forks a worker whenever the supervisor requests one.

Importing torch takes seconds of CPU time and hundreds of megabytes. The fork server does it once for all processes and restarts; a
forked process starts within milliseconds and shares that memory. Forking is safe because the server computes nothing, uses no
device and has one thread, which it checks before each fork.

Unlike with the fork server of Python's multiprocessing, the processes become children of the supervisor: they survive the end of the
server, and the supervisor gets their exit status (decision 20). If the server fails, the supervisor starts new programs.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from multiworld_serving.common.config.process import prctl
from multiworld_serving.deploy.processes.child_process import ChildProcess

logger = logging.getLogger(__name__)

IMPORT_TIMEOUT_S = 60.0
"""Timeout of the imports: ten times what they take on two busy cores."""
FORK_TIMEOUT_S = 5.0
"""Timeout of a fork, which takes milliseconds."""

_MESSAGE_BYTES = 1 << 16
_MAX_FDS = 9
"""Descriptors of a request: standard input, and those that the process inherits."""
_REPARENT_POLL_S = 0.0005
_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """The client side, used by the supervisor as `with ForkServer(…) as fork_server`. Must be used from one event loop."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start nothing yet.

        Args:
            command: a program that calls `serve_forks` after its imports; the descriptor of its socket becomes its last argument.
            environment: of that process, inherited by all that it forks.
        """
        self._command = command
        self._environment = environment
        self._process: ChildProcess | None = None
        self._socket = socket.socket()
        self._is_ready = self._closed = False
        self._lock = asyncio.Lock()

    def __enter__(self) -> Self:
        """Start the server process; does not wait for its imports."""
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        self._end()

    def close(self) -> None:
        """Fork no more. A fork in progress completes; a call that waits for the imports returns None. Forked processes keep running."""
        self._closed = True
        if self._process is not None and not self._is_ready:
            self._process.send(signal.SIGKILL)  # the waiting call reads end-of-file

    async def fork(self, command: Sequence[str], fds: Sequence[int] = ()) -> ChildProcess | None:
        """Fork a process with this command line and these descriptors, under the same numbers. Waits for the imports of the server.

        Returns None if the server cannot: start the process as a new program instead. A server that has failed is replaced, for later
        calls. Cancelling is safe: a process that was not returned exits by itself.
        """
        expected = self._process
        async with self._lock:
            if self._closed or self._process is None or self._process is not expected:
                return None
            try:
                return await self._request(command, fds)
            except BaseException as error:
                self._end()
                if not isinstance(error, OSError):  # a TimeoutError is an OSError
                    raise
                if not self._closed:
                    reason = str(error) or type(error).__name__
                    logger.warning("the fork server has failed (%s): starting the process as a new program", reason)
                    self._start()
                return None

    async def _request(self, command: Sequence[str], fds: Sequence[int]) -> ChildProcess:
        """Request one fork. Raises OSError if the server has failed."""
        if not self._is_ready:
            await self._receive(IMPORT_TIMEOUT_S)
            self._is_ready = True
        prctl(_PR_SET_CHILD_SUBREAPER, 1)  # only now, so that no other orphans become children of this process
        read_fd, hold_fd = os.pipe()
        try:
            socket.send_fds(self._socket, [json.dumps([command, fds]).encode()], [read_fd, *fds])
            return ChildProcess(int(await self._receive(FORK_TIMEOUT_S)), hold_fd)
        except BaseException:
            os.close(hold_fd)
            raise
        finally:
            os.close(read_fd)
            prctl(_PR_SET_CHILD_SUBREAPER, 0)

    async def _receive(self, timeout_s: float) -> bytes:
        """Receive "ready" or a process id. Raises OSError if something else or nothing comes."""
        async with asyncio.timeout(timeout_s):
            message = await asyncio.get_running_loop().sock_recv(self._socket, _MESSAGE_BYTES)
        if not message.isalnum():
            raise OSError(message.decode() or "it has ended")
        return message

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._socket.close()
        self._socket, self._is_ready = ours, False
        with theirs:
            fd = theirs.fileno()
            try:
                self._process = ChildProcess.spawn([*self._command, str(fd)], self._environment, [fd])
            except OSError as error:
                logger.warning("cannot start the fork server: %s", error)

    def _end(self) -> None:
        self._socket.close()
        process, self._process = self._process, None
        if process is not None:
            process.reap()


def serve_forks(control_fd: int) -> list[str] | None:
    """Fork processes until the supervisor ends. Returns the command line in each of them, and None in the server at the end.

    Args:
        control_fd: the socket to the supervisor. A request is a command line, and descriptors with the numbers that they must get.
    """
    gc.collect()
    gc.freeze()  # the garbage collector writes to every object it visits, which would unshare its memory page
    with socket.socket(fileno=control_fd) as control, contextlib.suppress(ConnectionError):
        reply = "ready"
        while True:
            control.send(reply.encode())
            message, fds, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, _MAX_FDS)
            if not message:
                return None
            try:
                pid = _fork()
            except OSError as error:
                reply = str(error)
            else:
                if not pid:
                    command: list[str]
                    command, numbers = json.loads(message)
                    for fd, number in zip(fds, [0, *numbers], strict=True):
                        os.dup2(fd, number)
                    return command
                reply = str(pid)
            finally:
                for fd in fds:
                    os.close(fd)
    return None


def _fork() -> int:
    """Fork a child with its own session that is reparented to the nearest subreaper. Returns its pid, and 0 in the child. Raises OSError.

    Forks twice: the intermediate process exits at once, which reparents the child.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        raise OSError("an import has started a thread, and threads do not survive a fork")
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb") as report, open(write_fd, "wb", buffering=0) as pid_of:
        if between := os.fork():
            if status := os.waitstatus_to_exitcode(os.waitpid(between, 0)[1]):
                raise OSError(status, "cannot fork")
            return int(report.read(16))
        between = os.getpid()
        try:
            if pid := os.fork():
                pid_of.write(b"%16d" % pid)
                os._exit(0)
        except OSError as error:
            os._exit(error.errno or 1)
    while os.getppid() == between:  # the end of this parent would kill the child after `exit_with_parent`
        time.sleep(_REPARENT_POLL_S)
    os.setsid()
    return 0
