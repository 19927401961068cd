"""Threads for work that would block the event loop: images to decode, versions to load."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from multiworld.execution.threads import DaemonThread
from multiworld_serving.common.service.errors import OverloadedError

T = TypeVar("T")

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""Maximum wait at shutdown for work that runs."""
_POLL_S = 0.01


class DaemonThreads:
    """Runs work on threads in FIFO order, for one event loop.

    Threads start on demand and end when the `async with` block ends. Unlike those of an executor, a thread that is blocked then is
    abandoned: it does not keep the process from exiting.

    Args:
        threads: maximum number of threads.
        name: prefix of their names.
        max_waiting: maximum number of calls that wait for a thread; further ones are rejected.
    """

    def __init__(self, threads: int, name: str, *, max_waiting: int = 1) -> None:
        self._max_threads = threads
        self._name = name
        self._max_waiting = max_waiting
        self._queue: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._threads = 0
        self._open = 0
        """Calls in the queue or running, also those whose caller was cancelled."""

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on a thread; return its result or raise its exception.

        If cancelled, waiting work does not start, and running work finishes on its thread.

        Raises:
            OverloadedError: `max_waiting` calls wait already.
            RuntimeError: the system cannot start a thread, and none runs yet.
        """
        if self._open >= self._max_threads + self._max_waiting:
            raise OverloadedError(f"{self._max_waiting} images wait to be decoded, which is the limit; try again later")
        loop = asyncio.get_running_loop()
        if self._threads < self._max_threads:
            self._start_thread(loop)
        future: asyncio.Future[T] = loop.create_future()
        self._open += 1
        self._queue.put((work, future))
        return await future

    def close(self) -> None:
        """End each thread after the queued work. Does not wait."""
        for _ in range(self._threads):
            self._queue.put(None)

    def _start_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            DaemonThread(lambda: self._run(loop), f"{self._name}-{self._threads}").start()
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._threads += 1

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            while (queued := self._queue.get()) is not None:
                work, future = queued
                result = error = None
                if not future.cancelled():
                    try:
                        result = work()
                    except BaseException as raised:  # noqa: BLE001 - passed to the caller through the future
                        error = raised
                loop.call_soon_threadsafe(self._complete, future, result, error)
                del queued, work, future, result, error  # do not keep an image in memory until the next work arrives

    def _complete(self, future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
        self._open -= 1
        if future.done():  # the caller was cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Wait for work that has begun, for a limited time."""
        self.close()
        until_s = time.monotonic() + _CLOSE_S
        while self._open and time.monotonic() < until_s:  # noqa: ASYNC110 - once, at the end
            await asyncio.sleep(_POLL_S)
        if self._open:
            logger.error(
                "%d calls on threads %s are blocked; stopping without waiting for them", self._open, self._name
            )
