"""Waiting: for a state of which no event tells, and of a thread until the test goes on."""

import asyncio
import threading
import time
from collections.abc import Callable, Sized

_PATIENCE_S = 300.0
"""Shorter than a test may take; long enough for the start of several processes on a machine with other work and cold files."""
_PAUSE_S = 0.005
_REQUEST_PAUSE_S = 0.02
"""Longer, because most conditions ask a service, which has other work."""


async def until(holds: Callable[[], object]) -> None:
    """Poll on the event loop until the condition holds. Raises TimeoutError when it still does not."""
    async with asyncio.timeout(_PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(_PAUSE_S)


def wait_until(holds: Callable[[], object]) -> None:
    """Poll in the calling thread until the condition holds. Raises TimeoutError when it still does not."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise TimeoutError
        time.sleep(_REQUEST_PAUSE_S)


def wait_for_more(items: Sized, count: int) -> None:
    """Wait until there are so many more of them, such as the samples of a load."""
    wanted = len(items) + count
    wait_until(lambda: len(items) >= wanted)


class Gate:
    """A call that blocks its thread until it is opened."""

    def __init__(self) -> None:
        self.begun, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self._open.wait(_PATIENCE_S)

    def open(self) -> None:
        self._open.set()

    async def until_begun(self) -> None:
        """Wait until the call blocks."""
        assert await asyncio.to_thread(self.begun.wait, _PATIENCE_S)
