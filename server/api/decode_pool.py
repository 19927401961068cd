"""A pool of decoding threads with a bounded queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from multiworld_serving.server.daemon_threads import DaemonThreadPool
from multiworld_serving.server.errors import OverloadedError

T = TypeVar("T")

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
_CLOSE_S = 5.0
"""Maximum wait at shutdown for images being decoded; one takes seconds at most."""


class DecodePool:
    """Runs work on threads in FIFO order.

    Threads start on demand and end when the `async with` block ends. A thread that is blocked then is abandoned; it does not
    keep the process from exiting.

    Args:
        threads: maximum number of threads.
        max_waiting: maximum number of callers that wait for a thread; further ones are rejected.
    """

    def __init__(self, *, threads: int, max_waiting: int) -> None:
        self._threads = DaemonThreadPool(threads, "decode")
        self._running: set[Future[Any]] = set()
        self._free = asyncio.Semaphore(threads)
        self._max_waiting = max_waiting
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """Number of callers that wait for a thread."""
        return self._waiting

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` on a thread; return its result or raise its exception.

        If cancelled, waiting work does not start, and running work finishes on its thread.

        Raises:
            OverloadedError: `max_waiting` callers wait already.
        """
        await self._acquire_thread()
        loop = asyncio.get_running_loop()
        try:
            future = self._threads.submit(work)
        except BaseException:
            self._free.release()
            raise
        self._running.add(future)
        # Release when the thread is free, not when this coroutine ends: after a cancellation the thread still runs.
        future.add_done_callback(lambda done: self._release_thread(loop, done))
        return await asyncio.wrap_future(future)

    async def _acquire_thread(self) -> None:
        if self._free.locked() and self._waiting >= self._max_waiting:
            raise OverloadedError(
                f"{self._waiting} images wait to be decoded, which is the limit; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1

    def _release_thread(self, loop: asyncio.AbstractEventLoop, done: Future[Any]) -> None:
        self._running.discard(done)
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._free.release)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for running work, for a limited time."""
        self._threads.close()
        if running := [asyncio.wrap_future(future) for future in tuple(self._running)]:
            _, stuck = await asyncio.wait(running, timeout=_CLOSE_S)
            for future in stuck:
                future.cancel()
            if stuck:
                logger.error(
                    "%d images are still being decoded after %g s; stopping without waiting for them",
                    len(stuck),
                    _CLOSE_S,
                )
