"""One child process.

The kernel ends a child with this process, even after SIGKILL (`exit_with_parent`). The standard input of a child is a pipe that this
process holds open, so that a child that starts too late for that notices it too. Each child has its own session, so that Ctrl-C in a
terminal signals only the supervisor, which stops its children in order.
"""

import asyncio
import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn, Self

from setproctitle import setproctitle

KILL_TIMEOUT_S = 5.0
"""Timeout of a process to end after SIGKILL; one that takes longer hangs in the kernel."""


class ChildProcess:
    """A process with its own session. Only `reap` collects its exit status, so its pid is not reused before that."""

    def __init__(self, pid: int, hold_fd: int) -> None:
        """Wrap a process that was started already. Raises OSError if no descriptor is available.

        Args:
            pid: a child of this process and the leader of its session.
            hold_fd: write end of its standard input, closed by `reap`.
        """
        self.pid = pid
        self.started_s = time.monotonic()
        self._pidfd = os.pidfd_open(pid)
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
            child = cls(process.pid, hold_fd)
        except OSError:
            os.close(hold_fd)
            raise
        finally:
            os.close(read_fd)
        child._process = process
        return child

    @classmethod
    def fork(
        cls, title: str, program: Callable[[], object], environment: Mapping[str, str], fds: Collection[int] = ()
    ) -> Self:
        """Fork a process that calls `program` and inherits these descriptors. Raises OSError.

        It starts within milliseconds and shares the memory of modules that this process has imported. This process must have one thread,
        because threads do not survive a fork, and must not use a device.
        """
        read_fd, hold_fd = os.pipe()
        # The handlers of this process must not run in the child: they write to the event loop of this process.
        signals = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
        try:
            if not (pid := os.fork()):
                _run_child(title, program, environment, read_fd, fds, signals)
            return cls(pid, hold_fd)
        except OSError:
            os.close(hold_fd)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
            os.close(read_fd)

    def send(self, signum: int) -> None:
        """Signal the process, but not its children. Must not be called after `reap`."""
        os.kill(self.pid, signum)

    async def ended(self) -> None:
        """Wait until the process has ended. Cancelling is safe."""
        await readable(self._pidfd)

    def kill(self) -> None:
        """Send SIGKILL to the process and its process group, so that none of its children survive. Must not be called after `reap`."""
        self.send(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # a forked process may not have its session yet
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self, timeout_s: float = KILL_TIMEOUT_S) -> int:
        """Kill the process and its process group, and collect its exit status. Blocks until it has ended, for at most `timeout_s`.

        Returns the exit status, or the negated number of the signal that ended it. One that hangs in the kernel counts as killed.
        """
        self.kill()
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        has_ended = poll.poll(timeout_s * 1000)
        for fd in (self._pidfd, self._hold_fd):
            os.close(fd)
        if not has_ended:
            return -signal.SIGKILL
        if self._process is not None:
            return self._process.wait()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _run_child(
    title: str,
    program: Callable[[], object],
    environment: Mapping[str, str],
    stdin: int,
    fds: Collection[int],
    signals: set[int | signal.Signals],
) -> NoReturn:
    """Run the program in a forked child. Never returns to the event loop of the parent."""
    try:
        gc.freeze()  # the garbage collector writes to every object it visits, which would unshare its memory page
        asyncio._set_running_loop(None)
        signal.set_wakeup_fd(-1)
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        os.dup2(stdin, 0)
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > 2 and fd not in fds:
                with contextlib.suppress(OSError):  # the descriptor of the folder
                    os.close(fd)
        setproctitle(title)  # before the environment changes, whose memory it uses
        os.environ.clear()
        os.environ.update(environment)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        program()
    except Exception:  # noqa: BLE001 - the process ends here, and the log says why
        sys.stderr.write(f"{title}\n{traceback.format_exc()}")
    finally:
        os._exit(1)


def reap_adopted() -> None:
    """Collect processes that have ended after their parent, if this is the process that gets them: process 1 of a container.

    The children of this process are in its session, or lead their own.
    """
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if os.getsid(found.si_pid) in (found.si_pid, os.getsid(0)):
                return  # `reap` collects it
            os.waitpid(found.si_pid, 0)


async def readable(fd: int) -> None:
    """Wait until this descriptor can be read. Cancelling is safe."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(fd)


def status_text(returncode: int) -> str:
    """Format the result of `reap`: "0" or "1" for an exit status, "SIGKILL" for a signal."""
    if returncode >= 0:
        return str(returncode)
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
