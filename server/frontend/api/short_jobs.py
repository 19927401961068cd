"""Short jobs of requests, which run on the event loop because handing them to a thread takes as long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_TOGETHER = 32
"""Most jobs in one turn of the event loop."""


class ShortJobs:
    """Runs the jobs of requests that arrive together one after the other.

    The processor then has the code of the job in its caches: small images are decoded in half of the time that it takes when each request
    decodes its image between its other steps.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()

    def run(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """The result of `job`, or its exception, after this turn of the event loop. Cancelling drops a job that has not begun."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._run_some)
        self._waiting.append((job, future))
        return future

    def _run_some(self) -> None:
        try:
            for _ in range(min(_TOGETHER, len(self._waiting))):
                _settle(*self._waiting.popleft())
        finally:
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._run_some)


def _settle(job: Callable[[], T], future: asyncio.Future[T]) -> None:
    try:
        if not future.cancelled():
            future.set_result(job())
    except Exception as error:  # noqa: BLE001 - raised where the result is needed
        future.set_exception(error)
    finally:
        del job, future  # the traceback of an error keeps this frame
