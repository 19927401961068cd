"""Detects a peer whose event loop does not run.

The control loop's thread sends heartbeats even while the event loop of its process is blocked. Therefore heartbeats carry a count that the
event loop increments. A peer whose count does not change for too long is `stalled`. A heartbeat without a count is valid; its sender has
registered no event loop, and is not checked for stalls.
"""

import asyncio

from multiworld.control.frames import HEARTBEAT_BYTES, Heartbeat


class LoopCounter:
    """Increments a count while the registered event loop runs."""

    def __init__(self) -> None:
        self._count = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def register(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        """Increment the count on `loop` every `interval_s` seconds. Call it on that loop. Does nothing while a registered loop is open."""
        if self._loop is None or self._loop.is_closed():
            self._loop = loop
            self._tick(loop, interval_s)

    def stop(self) -> None:
        """Stop counting. Callable from any thread."""
        self._loop = None

    def heartbeat(self) -> bytes:
        """Return the encoded heartbeat to send now. Callable from any thread."""
        if self._loop is None or self._loop.is_closed():
            return HEARTBEAT_BYTES
        return Heartbeat(self._count).encode()

    def _tick(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        if self._loop is loop:
            self._count += 1
            loop.call_later(interval_s, self._tick, loop, interval_s)


class StallClock:
    """Measures from a peer's heartbeats how long its event loop has not run.

    Attributes:
        stalled_s: seconds in which heartbeats arrived with an unchanged count.
    """

    def __init__(self) -> None:
        self.stalled_s = 0.0
        self._count: int | None = None
        self._received_s = 0.0

    def on_heartbeat(self, count: int, now_s: float, max_gap_s: float) -> None:
        """Record a received heartbeat.

        Args:
            max_gap_s: at most this much of the time since the previous heartbeat counts. In a longer gap the whole peer process, or this
                one, did not run; the heartbeat timeout covers that.
        """
        if count == self._count:
            self.stalled_s += min(now_s - self._received_s, max_gap_s)
        else:
            self.stalled_s = 0.0
        self._count, self._received_s = count, now_s
