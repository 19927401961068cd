"""The threads on which images are decoded: a bounded number of them, and a bounded number of requests waiting for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from server.errors import OverloadedError

T = TypeVar("T")

_RETRY_AFTER_S = 1.0


class DecodePool:
    """Runs work off the event loop, first come first served.

    Threads are started by the first work and ended by leaving the `async with`.

    Args:
        threads: how many run at once.
        max_waiting: how many may wait for a thread; one more is refused.
    """

    def __init__(self, *, threads: int, max_waiting: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._free = asyncio.Semaphore(threads)
        self._max_waiting = max_waiting
        self._waiting = 0

    @property
    def waiting(self) -> int:
        """How many wait for a thread now."""
        return self._waiting

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises.

        Cancelling is safe: work that waits is never begun, work that runs is left to end on its thread.

        Raises:
            OverloadedError: `max_waiting` others wait already.
        """
        await self._take_thread()
        loop = asyncio.get_running_loop()
        try:
            future = self._threads.submit(work)
        except BaseException:
            self._free.release()
            raise
        # Not when this coroutine ends but when the thread is free: after cancelling, the two are not the same.
        future.add_done_callback(lambda _: self._give_back_thread(loop))
        return await asyncio.wrap_future(future)

    async def _take_thread(self) -> None:
        if self._free.locked() and self._waiting >= self._max_waiting:
            raise OverloadedError(
                f"{self._waiting} images are waiting to be decoded and no more may wait; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1

    def _give_back_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._free.release)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for what runs now: an image takes at most seconds."""
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
