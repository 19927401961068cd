"""Shares a machine's cores between its workers: a worker that computes uses the cores of idle workers too.

With two stages on two cores, each worker has one core. A single request is in one stage at a time, so without sharing it would leave
the other core idle and take twice as long.
"""

import fcntl
import os
import struct
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FLOCK = struct.Struct("hhqqi4x")
"""Linux's struct flock: type, whence, start, length, process."""

_OVERSUBSCRIBED = 2
"""More runnable threads than this per processor count as oversubscribed."""

_FIRST_BATCHES = 3
"""Batches with each number of threads before they are compared."""
_NEWEST, _NEWEST_OF_TRIAL = 0.2, 0.5
"""Weight of the newest batch in the mean time of a number of threads: of the one in use, and of the other one."""
_CLEARLY = 0.9
"""Fewer threads are used if they take less than this part of the time."""
_FIRST_TRIAL, _LAST_TRIAL = 16, 128
"""Batches until the other number of threads is tried again: at first, and after it was slower several times."""
_COST_OF_TRIALS, _RAREST_TRIAL = 0.004, 1024
"""Trials take at most this part of the time, but there is one in this many batches."""
_MOST_KINDS = 256


def oversubscribed() -> bool:
    """Whether other programs compete for the cores. Threads that synchronise with each other then also wait to be scheduled, and one
    thread is faster than two."""
    with suppress(OSError, ValueError, IndexError):
        runnable = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        return runnable > _OVERSUBSCRIBED * (os.cpu_count() or 1)
    return False


class ThreadChoice:
    """Learns which of two numbers of threads computes one kind of work in less time.

    Threads of one operation wait for each other. When other programs use the cores, or when operations are small, one thread may be faster
    than two, and this depends on the model and on the batch size. So the time of batches decides: the faster number is used, and the other
    one is tried again now and then.
    """

    def __init__(self) -> None:
        self._mean_s: dict[int, float] = {}
        """Seconds per unit of work, by number of threads."""
        self._batches: dict[int, int] = {}
        """Batches computed, by number of threads."""
        self._used = 0
        self._until_trial = self._interval = _FIRST_TRIAL

    def choose(self, most: int, fewest: int) -> int:
        """`most` or `fewest`, whichever to use for the next batch."""
        for threads in (most, fewest):
            if self._batches.get(threads, 0) < _FIRST_BATCHES:
                return threads
        self._used = fewest if self._mean_s[fewest] < _CLEARLY * self._mean_s[most] else most
        if self._until_trial:
            self._until_trial -= 1
            return self._used
        self._interval = min(2 * self._interval, _LAST_TRIAL)
        self._until_trial = max(self._interval, self._affordable())
        return most + fewest - self._used

    def _affordable(self) -> int:
        """Batches between trials of a number of threads that is clearly slower."""
        slower_by = max(self._mean_s.values()) / min(self._mean_s.values()) - 1
        return min(_RAREST_TRIAL, round(slower_by / _COST_OF_TRIALS))

    def measured(self, threads: int, unit_s: float) -> None:
        """So many threads have computed a batch, in this time per unit of work."""
        self._batches[threads] = batches = self._batches.get(threads, 0) + 1
        newest = 1 / batches if batches <= _FIRST_BATCHES else _NEWEST if threads == self._used else _NEWEST_OF_TRIAL
        mean_s = self._mean_s.get(threads, unit_s)
        self._mean_s[threads] = mean_s + newest * (unit_s - mean_s)


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
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._index = index
        self._others = [other for other in range(workers) if other != index]
        self._total = total
        self._oversubscribed = oversubscribed
        self._clock_s = clock_s
        self._choices: dict[Hashable, ThreadChoice] = {}
        """By stage and size of batch."""
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
    def acquire_cores(self, stage: Hashable, elements: int) -> Iterator[int]:
        """Count as computing while the block runs. Yields how many threads to use: at most an equal share, at least 1.

        Args:
            stage: what is computed.
            elements: size of the batch, at least 1. Batches of one stage and about the same size take about the same time per element.
        """
        with suppress(OSError):  # another process has the same index; the others count both as one
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._index)
        try:
            shares = 1 + (len(self._others) if self._oversubscribed() else self._busy_others())
            least = max(1, self._total // self._most_shares)
            choice, began_s = self._choice(stage, elements), self._clock_s()
            yield (threads := choice.choose(max(least, self._total // shares), least))
            choice.measured(threads, (self._clock_s() - began_s) / elements)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._index)

    def _choice(self, stage: Hashable, elements: int) -> ThreadChoice:
        work = stage, elements.bit_length()
        if work not in self._choices and len(self._choices) >= _MOST_KINDS:
            self._choices.clear()  # most are of versions that are not served any more
        return self._choices.setdefault(work, ThreadChoice())

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
