"""Work that costs more the more workers there are, and that each change of a worker asks for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_PAUSE_S_PER_WORKER = 1e-4
"""Each piece of work takes a few microseconds for each worker, so it takes a few percent of the CPU at most."""


class Paced:
    """Does work soon after it was asked for, once for all that have asked until then.

    Between two times it waits 0.1 ms for each worker. So the CPU time for one change does not grow with the number of workers.

    Args:
        work: must not raise.
        num_workers: how many there are now.
    """

    def __init__(self, work: Callable[[], None], num_workers: Callable[[], int]) -> None:
        self._work = work
        self._num_workers = num_workers
        self._earliest_s = float("-inf")
        self._timer: tuple[float, asyncio.TimerHandle] | None = None
        """When it fires, as `time.monotonic()`."""
        self._done = asyncio.Event()

    def ask(self, at_s: float = float("-inf")) -> None:
        """Do the work at this time or earlier; as soon as possible if none is given."""
        at_s = max(at_s, self._earliest_s)
        if self._timer is not None and self._timer[0] <= at_s:
            return
        self.cancel()
        delay_s = max(0.0, at_s - time.monotonic())
        self._timer = at_s, asyncio.get_running_loop().call_later(delay_s, self._do)

    async def until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait until this holds; it is checked each time the work is done. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self._done.wait()

    def cancel(self) -> None:
        """Forget who has asked."""
        if self._timer is not None:
            self._timer[1].cancel()
            self._timer = None

    def _do(self) -> None:
        self._timer = None
        self._earliest_s = time.monotonic() + _PAUSE_S_PER_WORKER * self._num_workers()
        self._work()
        self._done.set()
        self._done = asyncio.Event()
