"""A process that imports what workers need once, and forks a worker whenever the supervisor requests one.

Importing torch takes seconds of CPU time and hundreds of megabytes. The fork server does it once for all workers and restarts; a
forked worker starts within milliseconds and shares that memory. Forking is safe because the server computes nothing, uses no
device and has one thread, which it checks before each fork. A failure of the server is not fatal: if it has died, hangs or refuses,
the supervisor starts the worker as a new program.

The design follows Android's zygote and the fork server of Python's multiprocessing. Unlike in the latter, the workers become
children of the supervisor, which can reap them after the server has died, and their environment is set before torch is imported.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from multiworld_serving.deploy.processes.child_process import KILL_TIMEOUT_S, ChildProcess

logger = logging.getLogger(__name__)

IMPORT_TIMEOUT_S = 60.0
"""Timeout of the imports: ten times what they take on two busy cores."""
FORK_TIMEOUT_S = 5.0
"""Timeout of a fork, which takes milliseconds."""
ORPHAN_TIMEOUT_S = 60.0
"""Timeout of a worker whose fork request was abandoned: to report its pid, and then to exit before it is killed."""

_READY = b"ready"
_MESSAGE_BYTES = 1 << 16
_PID_BYTES = 4
_MAX_FDS = 8
"""Descriptors that a forked process may be given."""
_REPARENT_POLL_S = 0.0005
_POLL_S = 0.05
_PR_SET_CHILD_SUBREAPER = 36


class ForkRefusedError(Exception):
    """The server works but cannot fork; the message says why."""


class ForkServer:
    """The client side, used by the supervisor as `with ForkServer(…) as fork_server`. Must be used from one event loop."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start nothing yet.

        Args:
            command: a program that calls `run_fork_server` after its imports.
            environment: of that process, inherited by all workers.
        """
        self._command = command
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready = False
        self._killed: list[subprocess.Popen[bytes]] = []
        self._cleanup_tasks: set[asyncio.Task[None]] = set()
        """Background tasks that reap abandoned workers and killed servers."""
        self._lock = asyncio.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        """Start the server process; does not wait for its imports."""
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        self._end()
        for process in self._killed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_TIMEOUT_S)

    @property
    def pid(self) -> int | None:
        """Process id of the server; None if it does not run."""
        return self._process.pid if self._process else None

    def close(self) -> None:
        """Stop the server. A fork in progress completes; a call that waits for the imports returns None. Workers keep running."""
        self._closed = True
        if not self._lock.locked():
            self._end()
        elif not self._ready and self._process is not None:
            self._process.kill()  # a pending fork() call notices the end of the process

    async def fork(self, command: Sequence[str], fds: Sequence[int] = ()) -> ChildProcess | None:
        """Fork a process with this command line and these descriptors, under the same numbers.

        Returns None if the server cannot: start the process as a new program instead. Waits until the server has finished its imports.
        Cancelling is safe: a process that was not returned exits by itself.
        """
        expected = self._process
        async with self._lock:
            if self._socket is None or self._process is not expected:
                # The server that this call waited for has failed. A new one serves later calls.
                if self._process is None:
                    self._start()
                return None
            try:
                await self._until_ready()
                return await self._request_fork(command, fds)
            except ForkRefusedError as error:
                logger.warning("the fork server refuses to fork (%s): starting the process as a new program", error)
                return None
            except (OSError, ValueError, TypeError, KeyError) as error:  # a TimeoutError is an OSError
                if not self._closed:
                    reason = str(error) or type(error).__name__
                    logger.warning("the fork server has failed (%s): starting the process as a new program", reason)
                self._end()
                self._start()
                return None
            except BaseException:
                self._end()
                raise
            finally:
                if self._closed:
                    self._end()
                if self._killed:
                    self._run_in_background(self._reap_killed())

    async def _until_ready(self) -> None:
        if not self._ready:
            async with asyncio.timeout(IMPORT_TIMEOUT_S):
                if await self._receive() != _READY:
                    raise ValueError("unexpected message instead of ready")
            self._ready = True

    async def _request_fork(self, command: Sequence[str], fds: Sequence[int]) -> ChildProcess:
        """Request one fork. Raises ForkRefusedError if the server refuses; OSError, ValueError, TypeError or KeyError if it fails."""
        assert self._socket is not None
        with contextlib.ExitStack() as unclaimed, contextlib.ExitStack() as given:
            read_fd, hold_fd = os.pipe()
            given.callback(os.close, read_fd)
            unclaimed.callback(os.close, hold_fd)
            report, theirs = socket.socketpair()
            given.enter_context(theirs)
            report.setblocking(False)
            unclaimed.callback(lambda: self._run_in_background(_reap_orphan(report)))
            # The process that forks the worker exits at once; its child is reparented to the nearest subreaper, which is this process.
            with _subreaper():
                message = json.dumps({"command": list(command), "fds": list(fds)}).encode()
                socket.send_fds(self._socket, [message], [read_fd, theirs.fileno(), *fds])
                given.close()
                async with asyncio.timeout(FORK_TIMEOUT_S):
                    reply = json.loads(await self._receive())
                    if "forked" not in reply:
                        raise ForkRefusedError(reply["error"])
                    pid = await _read_pid(report)
            _check_is_child(pid)
            unclaimed.pop_all()
            report.close()
            return ChildProcess(pid, hold_fd)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._cleanup_tasks.add(task)
        task.add_done_callback(self._cleanup_tasks.discard)

    async def _reap_killed(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                while any(process.poll() is None for process in self._killed):  # noqa: ASYNC110 - Popen has no event
                    await asyncio.sleep(_POLL_S)
        self._killed = [process for process in self._killed if process.returncode is None]

    async def _receive(self) -> bytes:
        assert self._socket is not None
        message = await asyncio.get_running_loop().sock_recv(self._socket, _MESSAGE_BYTES)
        if not message:
            raise ConnectionError("the fork server has ended")
        return message

    def _start(self) -> None:
        self._killed = [process for process in self._killed if process.poll() is None]
        if self._closed:
            return
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            with theirs:
                try:
                    self._process = subprocess.Popen(  # noqa: S603 - the command comes from the caller
                        self._command, stdin=theirs.fileno(), env=self._environment, start_new_session=True
                    )
                except OSError:
                    ours.close()
                    raise
        except OSError as error:
            logger.warning("cannot start the fork server: %s", error)
        else:
            self._socket, self._ready = ours, False

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            # Do not wait here: the end of the process may take longer than the event loop may block.
            self._killed.append(self._process)
        self._socket = self._process = None


async def _read_pid(report: socket.socket) -> int:
    """Read the process id that a forked worker reports first. Raises OSError."""
    data = await asyncio.get_running_loop().sock_recv(report, _PID_BYTES)
    if not data:
        raise ConnectionError("the worker ended before it reported its pid")
    return int.from_bytes(data, "little")


def _check_is_child(pid: int) -> None:
    """Raise ChildProcessError, an OSError, if `pid` is not a child of this process."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


async def _reap_orphan(report: socket.socket) -> None:
    """Reap a worker whose fork request was abandoned, if it becomes a child of this process.

    Its standard input is closed, so it exits by itself; otherwise it is killed after a timeout.
    """
    with (
        report,
        contextlib.suppress(OSError),
    ):  # no worker was forked, or it is the child of another process, which reaps it
        async with asyncio.timeout(ORPHAN_TIMEOUT_S):
            pid = await _read_pid(report)
        _check_is_child(pid)
        child = ChildProcess(pid)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ORPHAN_TIMEOUT_S):
                await child.ended()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.reap()


def run_fork_server(run_child: Callable[[list[str]], int]) -> int:
    """Run the server: fork workers until the supervisor ends. Also returns in each worker, with its exit status.

    Standard input of the server is the socket to the supervisor. Each command line comes with two descriptors: a pipe that becomes
    the standard input of the worker and ends with the supervisor, and a socket on which the worker reports its process id.

    Args:
        run_child: runs the command line in the worker; returns its exit status.
    """
    command = None
    # The supervisor may end at any time.
    with socket.socket(fileno=os.dup(0)) as control, contextlib.suppress(ConnectionError):
        gc.collect()
        gc.freeze()  # the garbage collector writes to every object it visits, which would unshare its memory page
        control.send(_READY)
        command = _serve(control)
    return run_child(command) if command is not None else 0


def set_process_title(title: str) -> None:
    """Set the command line that `ps` shows, truncated to the length of the original command line."""
    # arg_start and arg_end, see proc(5): fields 48 and 49; the first two fields are removed here.
    columns = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(columns[45]), int(columns[46])
    if room := max(0, end - start):
        ctypes.memmove(start, title.encode()[: room - 1].ljust(room, b"\0"), room)


def _serve(control: socket.socket) -> list[str] | None:
    """Fork on request. Returns the command line in each worker, and None in the server when the supervisor has ended."""
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 2 + _MAX_FDS)
        if not message:
            return None
        try:
            forked = _fork()
        except OSError as error:
            answer: dict[str, object] = {"error": str(error)}
        else:
            answer = {"forked": True}
            if not forked:
                os.dup2(fds[0], 0)
                os.write(fds[1], os.getpid().to_bytes(_PID_BYTES, "little"))
                request = json.loads(message)
                for fd, number in zip(fds[2:], request["fds"], strict=True):
                    os.dup2(fd, number)
                command: list[str] = request["command"]
                return command
        finally:
            for fd in fds:
                os.close(fd)
        control.send(json.dumps(answer).encode())


def _fork() -> bool:
    """Fork a child with its own session that is reparented to the nearest subreaper. Returns False in the child. Raises OSError.

    Forks twice: the intermediate process exits at once, which reparents the child.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        raise OSError("an import has started a thread, and threads do not survive a fork")
    if (between := os.fork()) == 0:
        _fork_or_exit()
        os.setsid()
        return False
    if status := os.waitstatus_to_exitcode(os.waitpid(between, 0)[1]):
        raise OSError(
            status, f"cannot fork: {os.strerror(status)}" if status > 0 else "the intermediate process was killed"
        )
    return True


def _fork_or_exit() -> None:
    """Fork; the parent exits. Returns in the child only, when its parent has ended, whose end would kill it after `exit_with_parent`."""
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        os._exit(error.errno or 1)
    if pid:
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(_REPARENT_POLL_S)


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Make this process a child subreaper while the block runs. Raises OSError if the system does not support it."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this system has no child subreapers")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
