"""Shares a machine's cores between its workers: a worker that computes uses the cores of idle workers too.

With two stages on two cores, each worker has one core. A single request is in one stage at a time, so without sharing it would leave
the other core idle and take twice as long.
"""

import fcntl
import os
import struct
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

_FLOCK = struct.Struct("hhqqi4x")
"""Linux's struct flock: type, whence, start, length, process."""
_PROCESS_CLOCK = 2
"""In Linux's id of a process's clock of CPU time, see clock_getcpuclockid(3)."""
_REMEMBERED = struct.Struct("32s??")
"""Digest of a stage, and whether one row and the largest batch are computed on one thread."""
_PLACES = 256
"""For remembered stages. Two of them may have the same place; then only the last one is remembered."""
_PERIOD_S = 0.25
"""How often the CPU time of other processes is measured."""
_OUTDATED_S = 1.0
"""After this time without a batch, what other programs used says nothing about now: all cores count as free."""
_ROUNDED_UP = 0.45
"""A core of which more than 55 % is free counts as free."""

Threads = Literal["one", "share"]
"""How to compute a batch: on one thread, or on the worker's share of the free cores."""


def busy_s() -> float:
    """CPU time of all processes of the machine since it started; 0 if unknown."""
    with suppress(OSError, ValueError):
        user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_bytes().split(None, 9)[1:9])
        return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
    return 0.0


class BatchThreads(NamedTuple):
    """How to compute the batches of a stage. Measured when the stage is warmed up: for small operations one thread is faster.

    Attributes:
        single, largest: for one row, and for the largest batch, which stands for all batches of several rows.
    """

    single: Threads = "share"
    largest: Threads = "share"

    def of(self, rows: int) -> Threads:
        """How to compute a batch of so many rows."""
        return self.single if rows == 1 else self.largest


class SharedCores:
    """One worker's share of the cores that other programs leave free.

    Each worker locks one byte of a file while it computes. The kernel releases the lock of a process that dies. A frozen process keeps its
    lock, and so its share of the cores. The threads of one operation wait for each other, so a thread on a core that a frontend uses would
    delay the others. The file also has the process id of each worker: what the machine computes besides is that of other programs. A worker
    that replaces another one finds there what was measured for its stage.

    Args:
        path: a file, empty at first, the same for all workers of the machine.
        index: this worker's place in it, from 0 to `workers` - 1, unique per process.
        workers: number of workers that share.
        total: number of cores to share.
        machine_s: returns the CPU time of all processes of the machine.
    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(
        self, path: str, index: int, workers: int, total: int, machine_s: Callable[[], float] = busy_s
    ) -> None:
        self._index = index
        self._workers = workers
        self._total = total
        self._cores = max(total, os.cpu_count() or 1)
        self._machine_s = machine_s
        # Opened once: closing any descriptor of a file releases all locks that the process has on it.
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        os.pwrite(self._file, array("q", [os.getpid()]), 8 * index)
        self._measured = time.monotonic(), machine_s(), self._of_workers_s()
        self._free = float(total)

    @property
    def thread_counts(self) -> tuple[int, ...]:
        """Thread counts that `acquire_cores` may yield, ascending."""
        return tuple(sorted({1} | {max(1, self._total // count) for count in range(1, self._workers + 1)}))

    @contextmanager
    def acquire_cores(self, threads: Threads = "share") -> Iterator[int]:
        """Count as computing while the block runs. Yields how many threads to use: an equal part for each worker that computes now."""
        with suppress(OSError):  # another process has the same index; the others count both as one
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._index)
        try:
            outdated = time.monotonic() - self._measured[0] > _OUTDATED_S
            self._measure()
            if outdated:
                self._free = float(self._total)
            shares = 1 if threads == "one" else 1 + self._busy_others()
            yield 1 if threads == "one" else max(1, int(self._free / shares + _ROUNDED_UP))
        finally:
            self._measure()
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._index)

    def recall(self, stage: bytes) -> BatchThreads | None:
        """What a worker of this machine has measured for the stage with this digest of 32 bytes, if its fusion is accurate."""
        found = os.pread(self._file, _REMEMBERED.size, self._place_of(stage))
        if len(found) < _REMEMBERED.size or not found.startswith(stage):
            return None
        _, *on_one = _REMEMBERED.unpack(found)
        single, largest = ("one" if each else "share" for each in on_one)
        return BatchThreads(single, largest)  # type: ignore[arg-type]  # mypy widens the literals

    def remember(self, stage: bytes, threads: BatchThreads) -> None:
        """Record what was measured for a stage whose fusion is accurate."""
        found = _REMEMBERED.pack(stage, threads.single == "one", threads.largest == "one")
        os.pwrite(self._file, found, self._place_of(stage))

    def _place_of(self, stage: bytes) -> int:
        return 8 * self._workers + _REMEMBERED.size * (stage[0] % _PLACES)

    def close(self) -> None:
        """Close the file, which releases the lock."""
        os.close(self._file)

    def _measure(self) -> None:
        """Find out how many cores other programs have left free since the last measurement."""
        before_s, machine_s, workers_s = self._measured
        now_s = time.monotonic()
        if now_s - before_s < _PERIOD_S:
            return
        self._measured = now_s, self._machine_s(), self._of_workers_s()
        used_s = (self._measured[1] - machine_s) - max(0.0, self._measured[2] - workers_s)
        self._free = min(self._total, self._cores - max(0.0, used_s) / (now_s - before_s))

    def _of_workers_s(self) -> float:
        """CPU time of all workers that run."""
        found_s = 0.0
        for pid in array("q", os.pread(self._file, 8 * self._workers, 0)):
            with suppress(OSError):  # it has ended
                found_s += time.clock_gettime(~pid << 3 | _PROCESS_CLOCK) if pid else 0.0
        return found_s

    def _busy_others(self) -> int:
        """How many other workers compute now. Stops counting once this worker's share is one core."""
        busy = 0
        for other in range(self._workers):
            if busy + 1 >= self._total:
                break
            if other != self._index:
                asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, other, 1, 0)
                busy += _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK
        return busy
