"""Signals, limits and resource usage of processes on this machine."""

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

_ESTABLISHED, _LISTENING = "01", "0A"
"""States in /proc/PID/net/tcp."""


class Connection(NamedTuple):
    """One TCP connection over IPv4 of a process, such as ("127.0.0.1", 40001, "127.0.0.1", 8001)."""

    local_host: str
    local_port: int
    remote_host: str
    remote_port: int


class SystemProcess:
    """A process, referenced by a pidfd so that a reused pid is never signalled.

    Use as `with SystemProcess(pid)`. Raises ProcessLookupError if there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._pidfd)

    def send(self, signum: signal.Signals) -> bool:
        """Send a signal. Returns False if the process has ended."""
        try:
            signal.pidfd_send_signal(self._pidfd, signum)
            return True
        except ProcessLookupError:
            return False

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process while the block runs."""
        self.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    def throttle(self, duration_s: float, *, share: float, period_s: float = 0.1) -> None:
        """Let the process run for only `share` of each `period_s`, for `duration_s` in total."""
        until_s = time.monotonic() + duration_s
        while time.monotonic() < until_s:
            with self.stopped():
                time.sleep(period_s * (1 - share))
            time.sleep(period_s * share)

    @contextlib.contextmanager
    def without_memory(self) -> Iterator[None]:
        """Let new memory allocations of the process fail while the block runs; memory that it has stays usable."""
        before = resource.prlimit(self.pid, resource.RLIMIT_AS)
        resource.prlimit(self.pid, resource.RLIMIT_AS, (1, before[1]))
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self.pid, resource.RLIMIT_AS, before)

    def connections_as_client(self) -> list[Connection]:
        """Return its established connections as its clients see them, if they connected to it; the others as `connections` does."""
        listening = {each.local_port for each in self.connections(_LISTENING)}
        return [
            Connection(*each[2:], *each[:2]) if each.local_port in listening else each for each in self.connections()
        ]

    def connections(self, state: str = _ESTABLISHED) -> list[Connection]:
        """Return its TCP connections over IPv4 that are in this state: the established ones."""
        own = {
            link[len("socket:[") : -1] for link in _links(Path(f"/proc/{self.pid}/fd")) if link.startswith("socket:[")
        }
        rows = (line.split() for line in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:])
        return [Connection(*_endpoint(row[1]), *_endpoint(row[2])) for row in rows if row[3] == state and row[9] in own]


def parent(pid: int) -> int:
    """Return the parent process id. Raises FileNotFoundError if there is no such process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@dataclass(frozen=True, slots=True)
class Resources:
    """Resource usage of one process."""

    threads: int
    descriptors: int
    resident_mib: float


def resources(pid: int) -> Resources:
    """Return the current resource usage of a process. Raises OSError if it has ended."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    if "VmRSS" not in status:
        raise ProcessLookupError(f"process {pid} has ended")  # a zombie
    return Resources(int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd")), int(status["VmRSS"].split()[0]) / 1024)


def _links(folder: Path) -> Iterator[str]:
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # closed in the meantime
            yield os.readlink(folder / name)


def _endpoint(text: str) -> tuple[str, int]:
    """Parse an address in /proc/net/tcp of a little-endian machine: "0100007F:1F41" is ("127.0.0.1", 8001)."""
    host, _, port = text.partition(":")
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(host))), int(port, 16)
