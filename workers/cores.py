"""The cores of a machine, shared by the workers on it: who computes while others are idle computes on theirs too.

A pipeline of two stages on two cores gives each worker one. A lone request is in one stage at a time, and would leave the
other core idle: it would take twice as long as it has to.
"""

import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FLOCK = struct.Struct("hhqqi4x")
"""Linux's struct flock: type, whence, start, length, process."""


_CROWD = 2
"""So many threads that want to run for each processor are a crowd."""


def crowded() -> bool:
    """Whether other programs want the cores too. Threads that wait for each other there wait for their turns as well: one is faster
    than two then."""
    with suppress(OSError, ValueError, IndexError):
        runnable = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
        return runnable > _CROWD * (os.cpu_count() or 1)
    return False


class SharedCores:
    """One worker's view of them. Each worker has a seat: a byte of one file, which it locks while it computes.

    The kernel frees the lock of whoever dies. One that is frozen keeps its lock, and so its share of the cores.

    Args:
        path: the file. It is empty, and the same for all workers of the machine.
        seat: ours, from 0 to `seats` - 1; no two processes have the same.
        total: how many cores there are to share.
        crowded: tells whether to be content with an equal share among all seats, whoever computes.
    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, seat: int, seats: int, total: int, crowded: Callable[[], bool] = crowded) -> None:
        self._seat = seat
        self._others = [other for other in range(seats) if other != seat]
        self._total = total
        self._crowded = crowded
        # Never opened twice: closing one descriptor of a file frees all locks that a process has on it.
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    @property
    def shares(self) -> tuple[int, ...]:
        """How many threads `computing` may give, ascending."""
        return tuple(sorted({max(1, self._total // count) for count in range(1, len(self._others) + 2)}))

    @contextmanager
    def computing(self) -> Iterator[int]:
        """While the block lasts, we count as one who computes. Gives how many threads to take: an equal share, 1 at the least."""
        with suppress(OSError):  # somebody sits in our seat: the others count the two of us as one
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._seat)
        try:
            others = len(self._others) if self._crowded() else self._busy_others()
            yield max(1, self._total // (1 + others))
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._seat)

    def close(self) -> None:
        """Give the seat up."""
        os.close(self._file)

    def _busy_others(self) -> int:
        """How many others compute now; those beyond which our share would be one core anyway are not counted."""
        busy = 0
        for other in self._others:
            if busy + 1 >= self._total:
                break
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, other, 1, 0)
            busy += _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK
        return busy
