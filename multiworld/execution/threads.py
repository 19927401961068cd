"""Daemon threads whose start takes bounded time, even when memory is short."""

import threading
from collections.abc import Callable
from typing import Any

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
