"""Shares a machine's cores between its workers: a worker that computes uses the cores of idle workers too.

With two stages on two cores, each worker has one core. A single request is in one stage at a time, so without sharing it would leave
the other core idle and take twice as long.
"""

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FLOCK = struct.Struct("hhqqi4x")
"""Linux's struct flock: type, whence, start, length, process."""

_OVERSUBSCRIBED = 2
"""More runnable threads than this per processor count as oversubscribed."""

_MUCH_WAITING, _LITTLE_WAITING = 0.15, 0.03
"""Share of a batch's time spent waiting for a core, above which contention begins and below which it ends."""
_NEWEST = 0.1
"""Weight of the newest batch in the average of that share."""


def oversubscribed() -> bool:
    """Whether other programs compete for the cores. Threads that synchronise with each other then also wait to be scheduled, and one
    thread is faster than two."""
    with suppress(OSError, ValueError, IndexError):
        runnable = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        return runnable > _OVERSUBSCRIBED * (os.cpu_count() or 1)
    return False


def run_queue_ns() -> int:
    """Nanoseconds that the calling thread was ready to run and waited for a core; always 0 if the kernel does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    return 0


class CoreContention:
    """Whether other programs take the cores from a thread while it computes.

    Args:
        waited_ns: returns how long the calling thread has waited for a core.
        clock_ns: returns the time.
    """

    def __init__(
        self, waited_ns: Callable[[], int] = run_queue_ns, clock_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.high = False
        """Whether the thread has waited for much of its time in the last batches."""
        self._waited_ns = waited_ns
        self._clock_ns = clock_ns
        self._share = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure one batch, computed by the calling thread in the block."""
        waited_ns, began_ns = self._waited_ns(), self._clock_ns()
        try:
            yield
        finally:
            took_ns = max(1, self._clock_ns() - began_ns)
            share = min(1.0, (self._waited_ns() - waited_ns) / took_ns)
            self._share += _NEWEST * (share - self._share)
            self.high = self._share > (_LITTLE_WAITING if self.high else _MUCH_WAITING)


class SharedCores:
    """One worker's share of the cores. Each worker owns one byte of a file and locks it while it computes.

    The kernel releases the lock of a process that dies. A frozen process keeps its lock, and so its share of the cores.

    Args:
        path: an empty file, the same for all workers of the machine.
        index: this worker's byte, from 0 to `workers` - 1, unique per process.
        workers: number of workers that share.
        total: number of cores to share.
        oversubscribed: returns whether to use only an equal share among all workers, even if some are idle. The same is done, with at
            most half of the cores, while other programs take the cores from this worker's thread: two threads that wait for each other
            after every operation use several times the CPU time of one then.
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
        contention: CoreContention | None = None,
    ) -> None:
        self._index = index
        self._others = [other for other in range(workers) if other != index]
        self._total = total
        self._oversubscribed = oversubscribed
        self._contention = contention or CoreContention()
        # Opened once: closing any descriptor of a file releases all locks that the process has on it.
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """Thread counts that `acquire_cores` may yield, ascending."""
        return tuple(sorted({max(1, self._total // count) for count in range(1, self._most_shares + 1)}))

    @property
    def _most_shares(self) -> int:
        return max(2, len(self._others) + 1)

    @contextmanager
    def acquire_cores(self) -> Iterator[int]:
        """Count as computing while the block runs. Yields how many threads to use: an equal share, at least 1."""
        with suppress(OSError):  # another process has the same index; the others count both as one
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._index)
        try:
            if self._contention.high:
                shares = self._most_shares
            else:
                shares = 1 + (len(self._others) if self._oversubscribed() else self._busy_others())
            with self._contention.measure():
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
