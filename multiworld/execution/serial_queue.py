"""A queue for jobs of one world that must run one at a time, in the order in which they were added."""

import threading
from collections import deque
from collections.abc import Callable

from multiworld.execution.blocking_pool import BlockingPool


class SerialQueue:
    """Runs jobs in order on the blocking pool of the world. Occupies a thread only while it has jobs.

    Attributes:
        unposted: number of jobs that have not yet handed their operation to c10d. While it is not 0, later operations must be queued to
            keep the order. Maintained by `OperationExecutor` under the world's lock.
    """

    def __init__(self, pool: BlockingPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], object]] = deque()
        self._running = False
        self.unposted = 0

    def run(self, job: Callable[[], object]) -> None:
        """Run `job` after all jobs that were added before, even if one of them fails.

        Raises RuntimeError when the pool is closed or no thread can start.
        """
        with self._lock:
            self._jobs.append(job)
            if self._running:
                return
            try:
                self._pool.run(self._drain)
            except BaseException:
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
            self._pool.run_guarded(job)
            del job  # do not keep its tensors alive until the next job
