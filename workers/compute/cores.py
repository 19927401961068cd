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
from typing import Literal, NamedTuple

_FLOCK = struct.Struct("hhqqi4x")
"""Linux's struct flock: type, whence, start, length, process."""

_OVERSUBSCRIBED = 2.0
"""With more runnable threads than this per core, a worker uses only its equal share of the cores."""

Threads = Literal["one", "idle", "share"]
"""How to compute a batch: on one thread; on the worker's share of the cores if some are idle, else on one thread; or on its share."""


def runnable_per_core() -> float:
    """Runnable threads of the whole machine per core, this thread included; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) / (os.cpu_count() or 1)
    return 0.0


class BatchThreads(NamedTuple):
    """How to compute the batches of a stage. Measured when the stage is warmed up.

    Threads of one operation wait for each other. For the smallest operations one thread is faster. For small ones, several threads are
    faster on idle cores and need more CPU time, which other processes lack when no core is idle.

    Attributes:
        single, largest: for one row, and for the largest batch, which stands for all batches of several rows.
    """

    single: Threads = "share"
    largest: Threads = "share"

    def of(self, rows: int) -> Threads:
        """How to compute a batch of so many rows."""
        return self.single if rows == 1 else self.largest


class SharedCores:
    """One worker's share of the cores. Each worker owns one byte of a file and locks it while it computes.

    The kernel releases the lock of a process that dies. A frozen process keeps its lock, and so its share of the cores.

    Args:
        path: an empty file, the same for all workers of the machine.
        index: this worker's byte, from 0 to `workers` - 1, unique per process.
        workers: number of workers that share.
        total: number of cores to share.
        load: returns the runnable threads per core.
    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(
        self,
        path: str,
        index: int,
        workers: int,
        total: int,
        load: Callable[[], float] = runnable_per_core,
    ) -> None:
        self._index = index
        self._others = [other for other in range(workers) if other != index]
        self._total = total
        self._load = load
        # Opened once: closing any descriptor of a file releases all locks that the process has on it.
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """Thread counts that `acquire_cores` may yield, ascending."""
        return tuple(sorted({1} | {max(1, self._total // count) for count in range(1, len(self._others) + 2)}))

    @contextmanager
    def acquire_cores(self, threads: Threads = "share") -> Iterator[int]:
        """Count as computing while the block runs. Yields how many threads to use. A share is an equal part of the cores among the workers
        that compute now; of all workers, idle or not, on an oversubscribed machine, where threads also wait to be scheduled."""
        with suppress(OSError):  # another process has the same index; the others count both as one
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._index)
        try:
            load = self._load()
            if threads == "one" or (threads == "idle" and load > 1):
                yield 1
            else:
                shares = 1 + (len(self._others) if load > _OVERSUBSCRIBED else self._busy_others())
                yield max(1, self._total // shares)
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
