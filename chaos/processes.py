"""Worker processes of this machine, and what can be done to one from outside."""

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

_ESTABLISHED = "01"


class Connection(NamedTuple):
    """One TCP connection over IPv4, seen from a process: "127.0.0.1", 40001, "127.0.0.1", 8001."""

    local_host: str
    local_port: int
    remote_host: str
    remote_port: int


class Process:
    """A process to be hurt, held by a descriptor: a number that was given to another meanwhile is not signalled.

    Use as `with Process(pid)`. Raises ProcessLookupError when there is none.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._pidfd)

    def send(self, signum: signal.Signals) -> bool:
        """Signal it. False when it has ended."""
        try:
            signal.pidfd_send_signal(self._pidfd, signum)
            return True
        except ProcessLookupError:
            return False

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It stands still while the block runs."""
        self.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    def crawl(self, duration_s: float, *, share: float, period_s: float = 0.1) -> None:
        """Let it run for only a share of the time, in turns of `period_s`, and go on at its full speed after that."""
        until_s = time.monotonic() + duration_s
        while time.monotonic() < until_s:
            with self.stopped():
                time.sleep(period_s * (1 - share))
            time.sleep(period_s * share)

    @contextlib.contextmanager
    def without_memory(self) -> Iterator[None]:
        """It can map no further memory while the block runs: what it allocates anew fails, what it has it keeps."""
        before = resource.prlimit(self.pid, resource.RLIMIT_AS)
        resource.prlimit(self.pid, resource.RLIMIT_AS, (1, before[1]))
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self.pid, resource.RLIMIT_AS, before)

    def connections(self) -> list[Connection]:
        """Its established TCP connections over IPv4, those that it was found to have open just now."""
        own = {
            link[len("socket:[") : -1] for link in _links(Path(f"/proc/{self.pid}/fd")) if link.startswith("socket:[")
        }
        rows = (line.split() for line in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:])
        return [
            Connection(*_endpoint(row[1]), *_endpoint(row[2]))
            for row in rows
            if row[3] == _ESTABLISHED and row[9] in own
        ]


def parent(pid: int) -> int:
    """The process that started this one. Raises FileNotFoundError when there is no such process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@dataclass(frozen=True, slots=True)
class Resources:
    """What one process holds."""

    threads: int
    descriptors: int
    resident_mib: float


def resources(pid: int) -> Resources:
    """What this process holds now. Raises OSError when it has ended."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    if "VmRSS" not in status:
        raise ProcessLookupError(f"process {pid} has ended")  # and waits for its parent
    return Resources(int(status["Threads"]), len(os.listdir(f"/proc/{pid}/fd")), int(status["VmRSS"].split()[0]) / 1024)


def _links(folder: Path) -> Iterator[str]:
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):  # closed meanwhile
            yield os.readlink(folder / name)


def _endpoint(text: str) -> tuple[str, int]:
    """ "0100007F:1F41", as the kernel of a little-endian machine writes it, to ("127.0.0.1", 8001)."""
    host, _, port = text.partition(":")
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(host))), int(port, 16)
