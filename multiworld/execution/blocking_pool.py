"""Threads for blocking work of one world: NCCL, copies between devices and into tensors that are not contiguous.

Threads are created on demand and reused until the world closes. Above their limit, jobs wait.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from multiworld.execution.threads import DaemonThread

logger = logging.getLogger(__name__)


MAX_THREADS = 64


def _log(error: BaseException) -> None:
    logger.error("a job of a world failed", exc_info=error)


class BlockingPool:
    """A pool of threads that grows as needed, up to `max_threads`. The constructor starts no thread. With one thread, jobs run in order.

    Args:
        name: name of the threads.
        on_error: called with the error of a failed job, on the thread that ran the job.
    """

    def __init__(
        self, name: str, on_error: Callable[[BaseException], object] = _log, max_threads: int = MAX_THREADS
    ) -> None:
        self._name = name
        self._max_threads = max_threads
        self._on_error = on_error
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], object]] = deque()
        self._idle: list[SimpleQueue[Callable[[], object] | None]] = []
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def run(self, job: Callable[[], object]) -> None:
        """Run `job` on an idle or new thread, or when a thread is free. Raises RuntimeError after `close`, or when no thread can start."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the thread pool of the world is closed")
            if self._idle:
                self._idle.pop().put(job)
                return
            if len(self._threads) >= self._max_threads:
                self._waiting.append(job)
                return
            inbox: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
            inbox.put(job)
            thread = DaemonThread(self._serve, self._name, (inbox,))
            thread.start()
            self._threads.add(thread)

    def close(self, timeout_s: float) -> bool:
        """End the idle threads and wait at most `timeout_s` seconds in total for the busy ones. Returns whether all have ended."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            for inbox in self._idle:
                inbox.put(None)
            self._idle.clear()
            threads = list(self._threads)
        until_s = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():  # a job may close the pool
                thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _serve(self, inbox: SimpleQueue[Callable[[], object] | None]) -> None:
        try:
            while (job := inbox.get()) is not None:
                try:
                    job()
                except BaseException as error:  # noqa: BLE001 - the following jobs must run after any error
                    with contextlib.suppress(Exception):  # the callback may fail, too, when memory is short
                        self._on_error(error)
                del job  # else an idle thread would keep the tensors or the group of the job alive
                with self._lock:
                    if self._closed:
                        return
                    if self._waiting:
                        inbox.put(self._waiting.popleft())
                    else:
                        self._idle.append(inbox)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
