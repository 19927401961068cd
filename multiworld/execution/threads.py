"""Daemon threads whose start takes bounded time, even when memory is short, and a thread for the blocking work of one world."""

import contextlib
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

logger = logging.getLogger(__name__)

_START_S = 5.0
"""Seconds to wait for the start of a thread. It normally takes less than 1 ms; a thread that lacks memory can end before it reports."""


class DaemonThread(threading.Thread):
    """A daemon thread whose `start` raises RuntimeError when the thread does not start.

    `threading.Thread.start` waits forever for a thread that runs out of memory before it starts.
    """

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._started = _StartedEvent()
        self._claim = threading.Lock()  # acquired by the running thread, or by `start` when it gives up

    def start(self) -> None:
        """Start the thread. Raises RuntimeError when it does not start within 5 s; then `target` is never called."""
        super().start()
        if not self._started.is_set() and self._claim.acquire(blocking=False):
            raise RuntimeError(f"a new thread did not start within {_START_S:g} s; check the free memory")

    def run(self) -> None:
        if self._claim.acquire(blocking=False):
            super().run()


class _StartedEvent(threading.Event):
    """The event that `threading.Thread.start` waits for, with a timeout."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(_START_S if timeout is None else timeout)


class WorkerThread:
    """Runs jobs in order on one thread with this name, which the first job starts. A job handles its errors; others are logged."""

    def __init__(self, name: str) -> None:
        self._name = name
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
            except BaseException:  # the following jobs must run after any error
                with contextlib.suppress(Exception):  # logging may fail, too, when memory is short
                    logger.exception("a job of a world failed")
            del job  # else an idle thread would keep the tensors or the group of the job alive
