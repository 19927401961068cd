"""One child process.

The standard input of a child is a pipe that this process holds open: when this process ends, even by SIGKILL, the child reads
end-of-file and exits (`--exit-with-parent`). Each child has its own session, so that Ctrl-C in a terminal signals only the
leader, which drains before it stops the workers.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Self

logger = logging.getLogger(__name__)

KILL_TIMEOUT_S = 5.0
"""Timeout of a process to end after SIGKILL; one that takes longer hangs in the kernel."""
_POLL_S = 0.1
"""Poll interval of a process for which no pidfd could be opened."""
_REAP_POLL_S = 0.005


class ChildProcess:
    """A process with its own session. Only `reap` collects its exit status, so its pid is not reused before that."""

    def __init__(self, pid: int, hold_fd: int | None = None) -> None:
        """Wrap a process that was started already.

        Args:
            pid: a child of this process and the leader of its session.
            hold_fd: write end of its standard input, closed by `reap`; None if it is closed already.
        """
        self.pid = pid
        self.started_s = time.monotonic()
        self._hold_fd = hold_fd
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def spawn(cls, command: Sequence[str], environment: Mapping[str, str], fds: Sequence[int] = ()) -> Self:
        """Start a program that inherits these descriptors. Raises OSError if it cannot be started."""
        read_fd, hold_fd = os.pipe()
        try:
            process = subprocess.Popen(  # noqa: S603 - the command comes from the caller
                command, stdin=read_fd, env=environment, start_new_session=True, pass_fds=fds
            )
        except OSError:
            os.close(hold_fd)
            raise
        finally:
            os.close(read_fd)
        child = cls(process.pid, hold_fd)
        child._process = process
        return child

    def send(self, signum: int) -> None:
        """Signal the process, but not its children. Must not be called after `reap`."""
        os.kill(self.pid, signum)

    async def ended(self) -> None:
        """Wait until the process has ended. Cancelling is safe. Polls while no file descriptor is available."""
        while not self._has_ended():
            try:
                await self._ended_by_pidfd()
            except OSError as error:
                logger.debug("pid=%d no pidfd, polling: %s", self.pid, error)
                await asyncio.sleep(_POLL_S)

    async def _ended_by_pidfd(self) -> None:
        """Wait with a pidfd. Raises OSError if no file descriptor is available."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        pidfd = os.pidfd_open(self.pid)
        try:
            loop.add_reader(pidfd, event.set)
            try:
                await event.wait()
            finally:
                loop.remove_reader(pidfd)
        finally:
            os.close(pidfd)

    def _has_ended(self) -> bool:
        """Whether the process has ended. Does not collect its status."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def reap(self) -> int:
        """Send SIGKILL to its process group, so that none of its children survive, and collect its exit status.

        Returns the exit status, or the negated number of the signal that ended it.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._hold_fd is not None:
            os.close(self._hold_fd)
        if self._process is not None:
            return self._process.wait(KILL_TIMEOUT_S)
        deadline_s = time.monotonic() + KILL_TIMEOUT_S
        while not self._has_ended():
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(str(self.pid), KILL_TIMEOUT_S)
            time.sleep(_REAP_POLL_S)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def status_text(returncode: int) -> str:
    """Format the result of `reap`: "0" or "1" for an exit status, "SIGKILL" for a signal."""
    if returncode >= 0:
        return str(returncode)
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
