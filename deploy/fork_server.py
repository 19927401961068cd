"""A process that has imported what workers need, and forks a worker from itself whenever the supervisor wants one.

Importing torch takes seconds of a core and hundreds of megabytes. Here it happens once, however many workers there are and however
often they are started again; a forked worker runs within milliseconds, and shares that memory. It is safe to fork because the
server computes nothing, touches no device and has one thread, of which it makes sure each time. It is safe to rely on because nobody
does: when it has died, hangs or refuses, the worker is started as a program of its own.

The idea is that of Android's zygote and of the fork server in Python's multiprocessing. What differs from the latter: the workers
are the supervisor's own children, which it reaps whatever becomes of the server; and their environment was set before torch came.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from deploy.child import KILL_TIMEOUT_S, Child

logger = logging.getLogger(__name__)

START_LIMIT_S = 60.0
"""Longest wait for its imports: ten times what they take on two busy cores."""
REPLY_LIMIT_S = 5.0
"""Longest wait for a fork, which takes milliseconds."""

_READY = b"ready"
_MESSAGE_BYTES = 1 << 16
_PR_SET_CHILD_SUBREAPER = 36


class ForkRefusedError(Exception):
    """The server is well and cannot fork, for the reason that the message says."""


class ForkServer:
    """The supervisor's end of it, as `with ForkServer(…) as forks`. To be used from one event loop."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start nothing yet.

        Args:
            command: a program that calls `serve_forks` when it has imported everything.
            environment: of that process, and so of all workers.
        """
        self._command = command
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ready = False
        self._killed: list[subprocess.Popen[bytes]] = []
        self._turn = asyncio.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        """Start the process. It imports while the caller goes on."""
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
        """Its process; None when there is none."""
        return self._process.pid if self._process else None

    def close(self) -> None:
        """End it: a fork that was begun is finished, and who waits for the imports gets None. The workers stay."""
        self._closed = True
        if not self._turn.locked():
            self._end()
        elif not self._ready and self._process is not None:
            self._process.kill()  # who waits for it finds that it has ended

    async def fork(self, command: Sequence[str]) -> Child | None:
        """A worker with this command line; None when there is none to be had from here, and it is to be started otherwise.

        Waits for the imports if they are going on. Cancelling is safe: a worker that nobody was given ends by itself.
        """
        expected = self._process
        async with self._turn:
            if self._socket is None or self._process is not expected:
                # The one that this call has waited for was of no use. The next one is, perhaps, for those who come later.
                if self._process is None:
                    self._start()
                return None
            try:
                await self._until_ready()
                return await self._ask(command)
            except ForkRefusedError as error:
                logger.warning("the fork server refuses (%s): starting a worker without it", error)
                return None
            except (OSError, ValueError, TypeError, KeyError) as error:  # a TimeoutError is an OSError
                if not self._closed:
                    reason = str(error) or type(error).__name__
                    logger.warning("the fork server is of no use (%s): starting a worker without it", reason)
                self._end()
                self._start()
                return None
            except BaseException:
                self._end()
                raise
            finally:
                if self._closed:
                    self._end()

    async def _until_ready(self) -> None:
        if not self._ready:
            async with asyncio.timeout(START_LIMIT_S):
                if await self._receive() != _READY:
                    raise ValueError("it does not say that it is ready")
            self._ready = True

    async def _ask(self, command: Sequence[str]) -> Child:
        """Raises ForkRefusedError when the server says no; OSError, ValueError, TypeError, KeyError when it does not say it well."""
        assert self._socket is not None
        read_fd, hold_fd = os.pipe()
        try:
            # What forks the worker ends at once, and the nearest subreaper above inherits it: ours it is, to signal and to reap.
            with _subreaper():
                socket.send_fds(self._socket, [json.dumps(list(command)).encode()], [read_fd])
                async with asyncio.timeout(REPLY_LIMIT_S):
                    said = json.loads(await self._receive())
            if "pid" not in said:
                raise ForkRefusedError(said["error"])
            # An OSError unless it is our child.
            os.waitid(os.P_PID, said["pid"], os.WEXITED | os.WNOHANG | os.WNOWAIT)  # noqa: ASYNC222  does not block
            return Child(said["pid"], hold_fd)
        except BaseException:
            os.close(hold_fd)  # should it run after all, it reads that nobody wants it
            raise
        finally:
            os.close(read_fd)

    async def _receive(self) -> bytes:
        assert self._socket is not None
        message = await asyncio.get_running_loop().sock_recv(self._socket, _MESSAGE_BYTES)
        if not message:
            raise ConnectionError("it has ended")
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
                    self._process = subprocess.Popen(  # noqa: S603  the command is the caller's own
                        self._command, stdin=theirs.fileno(), env=self._environment, start_new_session=True
                    )
                except OSError:
                    ours.close()
                    raise
        except OSError as error:
            logger.warning("the fork server cannot be started: %s", error)
        else:
            self._socket, self._ready = ours, False

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            # Not waited for here: it takes the kernel longer than an event loop should stand still.
            self._killed.append(self._process)
        self._socket = self._process = None


def serve_forks(become: Callable[[list[str]], int]) -> int:
    """The server's end of it: fork until the supervisor is gone. Returns in each worker, too, what that ends with.

    Standard input is the socket to the supervisor; a worker's is a pipe that ends with the supervisor.

    Args:
        become: what a worker does with its command line; gives its exit status.
    """
    command = None
    # The supervisor may be gone at any moment.
    with socket.socket(fileno=os.dup(0)) as control, contextlib.suppress(ConnectionError):
        gc.collect()
        gc.freeze()  # the collector writes to all that it looks at, and what is written to is not shared any more
        control.send(_READY)
        command = _serve(control)
    return become(command) if command is not None else 0


def show_as(title: str) -> None:
    """What `ps` shows for this process: as much of it as its own command line had room for."""
    # Where the kernel looks for it, see proc(5): columns 48 and 49, of which the first two were cut off here.
    columns = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(columns[45]), int(columns[46])
    if room := max(0, end - start):
        ctypes.memmove(start, title.encode()[: room - 1].ljust(room, b"\0"), room)


def _serve(control: socket.socket) -> list[str] | None:
    """In a worker, its command line; None in the server, when the supervisor has ended."""
    while True:
        message, fds, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 1)
        if not message:
            return None
        try:
            pid = _fork()
        except OSError as error:
            answer: dict[str, object] = {"error": str(error)}
        else:
            answer = {"pid": pid}
            if pid == 0:
                os.dup2(fds[0], 0)
                command: list[str] = json.loads(message)
                return command
        finally:
            os.close(fds[0])
        control.send(json.dumps(answer).encode())


def _fork() -> int:
    """`os.fork`, but the child leads a session and is handed up to the nearest subreaper above. Raises OSError.

    It forks twice, and the process between ends at once: that is how one is handed up.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        raise OSError("something that was imported has started a thread, and threads do not survive a fork")
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb", buffering=0) as reader, open(write_fd, "wb", buffering=0) as writer:
        if (between := os.fork()) == 0:
            _fork_or_exit()
            os.setsid()
            writer.write(os.getpid().to_bytes(4, "little"))
            return 0
        writer.close()
        if status := os.waitstatus_to_exitcode(os.waitpid(between, 0)[1]):
            raise OSError(status, f"it cannot fork: {os.strerror(status)}" if status > 0 else "what forks was killed")
        if not (said := reader.read(4)):
            raise OSError("the worker was killed before it began")
        return int.from_bytes(said, "little")


def _fork_or_exit() -> None:
    """Returns in the child only."""
    try:
        pid = os.fork()
    except OSError as error:
        os._exit(error.errno or 1)
    if pid:
        os._exit(0)


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Orphans below this process become its children meanwhile. Raises OSError where there is no such thing."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this system does not hand orphans up")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
