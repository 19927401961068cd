"""A lane: work of one world that must be done one after the other, in the order in which it was asked for."""

import threading
from collections import deque
from collections.abc import Callable

from multiworld.waiters import Waiters


class Lane:
    """Runs its jobs in order on the world's waiting threads. It holds a thread only while it has something to do.

    Attributes:
        unposted: how many of its jobs have still to hand their operation to c10d: who would post at once must queue behind them.
            Kept by `Traffic`, under the world's lock.
    """

    def __init__(self, waiters: Waiters) -> None:
        self._waiters = waiters
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = False
        self.unposted = 0

    @property
    def busy(self) -> bool:
        """Whether a job is waiting or running."""
        return self._running

    def run(self, job: Callable[[], None]) -> None:
        """Run `job`, which must not raise, after all that were given before. Raises RuntimeError when the world has ended."""
        with self._lock:
            self._jobs.append(job)
            if self._running:
                return
            try:
                self._waiters.run(self._drain)
            except RuntimeError:
                self._jobs.clear()
                raise
            self._running = True

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running = False
                    return
                job = self._jobs.popleft()
            job()
            del job  # its tensors must not live until the next one comes
