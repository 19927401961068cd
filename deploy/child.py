"""One process that we started, and the one that is held in reserve for the next start.

A child's standard input is a pipe whose other end this process holds: when this process is gone, even by SIGKILL, the
child reads end-of-file and exits (`--exit-with-parent`). Each leads a session of its own, so that Ctrl-C in a terminal
reaches the leader alone, which drains before it stops the workers.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

KILL_TIMEOUT_S = 5.0
"""Longest wait for the end of a process after SIGKILL; one that takes longer hangs inside the kernel."""


class Child:
    """One process in a session of its own. Only `reap` collects its status: until then, no other can get its number."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it. Raises OSError if that fails."""
        read_fd, self._write_fd = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603  the command is the caller's own
                command, stdin=read_fd, env=environment, start_new_session=True
            )
        except OSError:
            os.close(self._write_fd)
            raise
        finally:
            os.close(read_fd)
        self.pid = self._process.pid
        self.started_s = time.monotonic()

    def tell(self, line: str) -> bool:
        """Write one line to its standard input; False when it has ended."""
        try:
            return os.write(self._write_fd, line.encode() + b"\n") > len(line.encode())
        except OSError:
            return False

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
        os.close(self._write_fd)
        return self._process.wait(KILL_TIMEOUT_S)


class Reserve:
    """One process that has imported everything and waits to be told, on its standard input, which command line to run.

    Importing torch takes seconds; a worker that is started from the reserve has them behind it.
    """

    def __init__(self, command: Sequence[str] | None, environment: Mapping[str, str]) -> None:
        """Start nothing yet. Without a `command` there never is a reserve."""
        self._command = command
        self._environment = environment
        self._child: Child | None = None

    def fill(self) -> None:
        """Start one if there is none."""
        if self._command is not None and self._child is None:
            with contextlib.suppress(OSError):  # then the next worker takes longer to start, that is all
                self._child = Child(self._command, self._environment)

    def take(self, command: Sequence[str]) -> Child | None:
        """The process, now running `command`; None if there is none that lives."""
        child, self._child = self._child, None
        if child is None:
            return None
        if child.tell(json.dumps(list(command))):
            child.started_s = time.monotonic()
            return child
        child.reap()
        return None

    def close(self) -> None:
        """End it."""
        if self._child is not None:
            self._child.reap()
            self._child = None


def status_text(returncode: int) -> str:
    """ "0" or "1" for an exit status, "SIGKILL" for a signal."""
    if returncode >= 0:
        return str(returncode)
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
