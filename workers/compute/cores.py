"""Shares a machine's cores between its workers: a worker that computes uses the cores of idle workers too.

With two stages on two cores, each worker has one core. A single request is in one stage at a time, so without sharing it would leave
the other core idle and take twice as long.
"""

import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_FLOCK = struct.Struct("hhqqi4x")
"""Linux's struct flock: type, whence, start, length, process."""

_OVERSUBSCRIBED = 2
"""More runnable threads than this per processor count as oversubscribed."""


def oversubscribed() -> bool:
    """Whether other programs compete for the cores. Threads that synchronise with each other then also wait to be scheduled, and one
    thread is faster than two."""
    with suppress(OSError, ValueError, IndexError):
        runnable = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        return runnable > _OVERSUBSCRIBED * (os.cpu_count() or 1)
    return False


class OneThread(NamedTuple):
    """For which batches of a stage one thread is faster than the worker's share of the cores.

    Threads of one operation wait for each other, so for small operations one thread may be faster. Measured when a stage is warmed up.

    Attributes:
        single, largest: for one row, and for the largest batch, which stands for all batches of several rows.
    """

    single: bool = False
    largest: bool = False

    def is_faster(self, rows: int) -> bool:
        """Whether to compute so many rows on one thread."""
        return self.single if rows == 1 else self.largest


SEVERAL_THREADS = OneThread()


class SharedCores:
    """One worker's share of the cores. Each worker owns one byte of a file and locks it while it computes.

    The kernel releases the lock of a process that dies. A frozen process keeps its lock, and so its share of the cores.

    Args:
        path: an empty file, the same for all workers of the machine.
        index: this worker's byte, from 0 to `workers` - 1, unique per process.
        workers: number of workers that share.
        total: number of cores to share.
        oversubscribed: returns whether to use only an equal share among all workers, even if some are idle.
    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(
        self,
        path: str,
        index: int,
        workers: int,
        total: int,
        oversubscribed: Callable[[], bool] = oversubscribed,
    ) -> None:
        self._index = index
        self._others = [other for other in range(workers) if other != index]
        self._total = total
        self._oversubscribed = oversubscribed
        # Opened once: closing any descriptor of a file releases all locks that the process has on it.
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """Thread counts that `acquire_cores` may yield, ascending."""
        return tuple(sorted({1} | {max(1, self._total // count) for count in range(1, len(self._others) + 2)}))

    @contextmanager
    def acquire_cores(self, *, one_thread: bool = False) -> Iterator[int]:
        """Count as computing while the block runs. Yields how many threads to use: `one_thread`, or an equal share of the cores."""
        with suppress(OSError):  # another process has the same index; the others count both as one
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._index)
        try:
            shares = 1 + (len(self._others) if self._oversubscribed() else self._busy_others())
            yield 1 if one_thread else max(1, self._total // shares)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._index)

    def close(self) -> None:
        """Close the file, which releases the lock."""
        os.close(self._file)

    def _busy_others(self) -> int:
        """How many other workers compute now. Stops counting once this worker's share is one core."""
        busy = 0
        for other in self._others:
            if busy + 1 >= self._total:
                break
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, other, 1, 0)
            busy += _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK
        return busy
