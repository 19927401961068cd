"""Small child processes for the supervisor tests: they start quickly and report through a named pipe."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from multiworld_serving.server.supervisor.child_process import ChildProcess
from multiworld_serving.server.supervisor.notify import NotifyListener
from multiworld_serving.server.supervisor.supervisor import Supervisor

PRELUDE = """
import os, signal, sys, time
slot, fifo, *rest = sys.argv[1:]
def report(word):
    out = os.open(fifo, os.O_WRONLY)
    os.write(out, f"{slot} {os.getpid()} {word}\\n".encode())
    os.close(out)
"""
FOREVER = "report('up'); signal.pause()"
EXIT_WITH_PARENT = "report('up'); sys.stdin.read(); report('parent-gone')"
SAY_GOODBYE = """
def goodbye(signum, frame):
    report('goodbye')
    sys.exit(0)
signal.signal(signal.SIGTERM, goodbye)
report('up')
signal.pause()
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); report('up'); time.sleep(1000)"
WITH_GRANDCHILD = """
if not (grandchild := os.fork()):
    os.execvp('sleep', ['sleep', '1000'])
report(f'up {grandchild}')
signal.pause()
"""


class Reports:
    """The reports of the children in order: [slot, pid, word, …] each.

    Args:
        forking: whether supervisors created here fork their children from this process.

    Attributes:
        notify: receives the signs of life of their children.
    """

    def __init__(self, fifo: Path, *, forking: bool) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(fifo)
        self.fifo = fifo
        self.forking = forking
        self.notify = NotifyListener()
        self._queue: asyncio.Queue[list[str]] = asyncio.Queue()
        self._fd = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self._fd, self._read)
        return self

    async def __aexit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)
        self.notify.__exit__()

    def _read(self) -> None:
        for line in os.read(self._fd, 65536).decode().splitlines():
            self._queue.put_nowait(line.split())

    async def next(self) -> list[str]:
        async with asyncio.timeout(60):
            return await self._queue.get()

    async def next_pid(self) -> int:
        return int((await self.next())[1])

    def command(self, script: str, slot: int) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", PRELUDE + script, str(slot), str(self.fifo)]

    def start(self, script: str, slot: int, environment: Mapping[str, str], fds: Sequence[int] = ()) -> ChildProcess:
        command = self.command(script, slot)
        if not self.forking:
            return ChildProcess.spawn(command, environment, fds)
        return ChildProcess.fork("", partial(run_here, command), environment, fds)

    def supervisor(self, script: str, count: int = 1, **options: Any) -> Supervisor:
        environment = os.environ | self.notify.environment
        return Supervisor(lambda slot: self.start(script, slot, environment), count, self.notify, **options)


def run_here(command: Sequence[str]) -> None:
    """Run a command of `Reports.command` in this process."""
    sys.argv = list(command[-3:])
    exec(command[-3], {})


def children() -> set[int]:
    """Process ids of this process's children, including zombies."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread ended in the meantime
            found.update(map(int, (task / "children").read_text().split()))
    return found


def freeze(pid: int) -> None:
    """SIGSTOP a child and wait until it is stopped; otherwise a pending SIGTERM would be handled first."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


async def end_of(pid: int) -> None:
    """Wait until a process (a child of any process) has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, ended.set)
    try:
        async with asyncio.timeout(60):
            await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


@contextlib.contextmanager
def no_child_left() -> Iterator[None]:
    """Check that the block leaves no new child process. Existing children may belong to other tests' services."""
    before = children()
    yield
    assert children() <= before


async def _supervise(fifo: str, forking: str) -> None:
    """Supervise two processes until this one is killed."""
    async with Reports(Path(fifo), forking=forking == "True").supervisor(EXIT_WITH_PARENT, 2):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_supervise(*sys.argv[1:]))
