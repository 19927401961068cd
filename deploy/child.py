"""One process that we started.

A child's standard input is a pipe whose other end this process holds: when this process is gone, even by SIGKILL, the
child reads end-of-file and exits (`--exit-with-parent`). Each leads a session of its own, so that Ctrl-C in a terminal
reaches the leader alone, which drains before it stops the workers.
"""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Self

KILL_TIMEOUT_S = 5.0
"""Longest wait for the end of a process after SIGKILL; one that takes longer hangs inside the kernel."""


class Child:
    """One process in a session of its own. Only `reap` collects its status: until then, no other can get its number."""

    def __init__(self, pid: int, hold_fd: int) -> None:
        """One that was started already.

        Args:
            pid: our own child, and the leader of its session.
            hold_fd: the other end of its standard input; closed by `reap`.
        """
        self.pid = pid
        self.started_s = time.monotonic()
        self._hold_fd = hold_fd
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def spawn(cls, command: Sequence[str], environment: Mapping[str, str]) -> Self:
        """Start a program. Raises OSError if that fails."""
        read_fd, hold_fd = os.pipe()
        try:
            process = subprocess.Popen(  # noqa: S603  the command is the caller's own
                command, stdin=read_fd, env=environment, start_new_session=True
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
        """Signal the process, not what it started. To be called before `reap` only."""
        os.kill(self.pid, signum)

    async def ended(self) -> None:
        """Wait until it has ended. Cancelling is safe."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        pidfd = os.pidfd_open(self.pid)
        loop.add_reader(pidfd, event.set)
        try:
            await event.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)

    def reap(self) -> int:
        """SIGKILL its process group, so that nothing it started stays behind, and collect its status.

        Returns the exit status, or minus the number of the signal that ended it.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self._hold_fd)
        if self._process is not None:
            return self._process.wait(KILL_TIMEOUT_S)
        pidfd = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(KILL_TIMEOUT_S * 1e3):
                raise subprocess.TimeoutExpired(str(self.pid), KILL_TIMEOUT_S)
        finally:
            os.close(pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def status_text(returncode: int) -> str:
    """ "0" or "1" for an exit status, "SIGKILL" for a signal."""
    if returncode >= 0:
        return str(returncode)
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
