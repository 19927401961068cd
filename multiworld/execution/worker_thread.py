"""A thread for blocking work of one world: NCCL, copies between devices and into tensors that are not contiguous."""

import contextlib
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from multiworld.execution.threads import DaemonThread

logger = logging.getLogger(__name__)


def _log(error: BaseException) -> None:
    logger.error("a job of a world failed", exc_info=error)


class WorkerThread:
    """Runs jobs in order on one thread, which the first job starts.

    Args:
        name: name of the thread.
        on_error: called with the error of a failed job, on the thread.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], object] = _log) -> None:
        self._name = name
        self._on_error = on_error
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, job: Callable[[], object]) -> None:
        """Run `job` when the earlier ones are done. Raises RuntimeError after `close`, or when the thread cannot start."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the thread of the world is closed")
            if self._thread is None:
                thread = DaemonThread(self._serve, self._name)
                thread.start()
                self._thread = thread  # set after the start: a thread that did not start cannot be joined
            self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Drop the jobs that wait, and wait at most `timeout_s` seconds for the running one. Returns whether the thread has ended."""
        with self._lock:
            self._closed = True
        if self._thread is None:
            return True
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None and not self._closed:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - the following jobs must run after any error
                with contextlib.suppress(Exception):  # the callback may fail, too, when memory is short
                    self._on_error(error)
            del job  # else an idle thread would keep the tensors or the group of the job alive
