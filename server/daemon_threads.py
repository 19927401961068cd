"""A thread pool of daemon threads: unlike an executor's, a blocked thread does not keep the process from exiting."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from multiworld.execution.threads import DaemonThread

T = TypeVar("T")


class DaemonThreadPool:
    """Runs work in order of submission. Threads start on demand and end after `close`.

    Args:
        count: maximum number of threads.
        name: prefix of the thread names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[DaemonThread] = []

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Start or queue `work`. Raises RuntimeError if the system cannot start a thread and none runs yet."""
        if len(self._threads) < self._count:
            self._start_thread()
        future: Future[T] = Future()
        self._waiting.put((future, work))
        return future

    def close(self) -> None:
        """End each thread after the queued work. Does not wait."""
        for _ in self._threads:
            self._waiting.put(None)

    def _start_thread(self) -> None:
        thread = DaemonThread(self._run, f"{self._name}-{len(self._threads)}")
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            future, work = item
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as error:  # noqa: BLE001 - passed to the caller through the future
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del item, future, work  # do not keep an image in memory until the next work arrives
