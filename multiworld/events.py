"""What happened to the worlds of a process, as a stream."""

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

from multiworld.errors import Cause

_QUEUE_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class WorldEvent:
    """One change of one world.

    Attributes:
        cause, rank: why it broke and who failed; None unless `kind` is "broken".
        at_s: when, as `time.monotonic()`.
    """

    kind: Literal["joined", "broken", "closed"]
    world_name: str
    epoch: int
    cause: Cause | None = None
    rank: int | None = None
    at_s: float = field(default_factory=time.monotonic)


class EventStream:
    """Hands every event to every reader, on the reader's own loop. `publish` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weak: a stream that is dropped, even one that was never read, takes its queue along.
        self._readers: weakref.WeakKeyDictionary[asyncio.Queue[WorldEvent | None], asyncio.AbstractEventLoop]
        self._readers = weakref.WeakKeyDictionary()

    def publish(self, event: WorldEvent | None) -> None:
        """None ends the streams."""
        with self._lock:
            readers = list(self._readers.items())
        for queue, loop in readers:
            with contextlib.suppress(RuntimeError):  # that reader's loop has ended
                loop.call_soon_threadsafe(_put, queue, event)

    def subscribe(self) -> AsyncIterator[WorldEvent]:
        """Every event from this call on, also those before the first `async for` step. A reader that lags loses the oldest."""
        queue: asyncio.Queue[WorldEvent | None] = asyncio.Queue(_QUEUE_LIMIT)
        with self._lock:
            self._readers[queue] = asyncio.get_running_loop()
        return _read(queue)


async def _read(queue: asyncio.Queue[WorldEvent | None]) -> AsyncIterator[WorldEvent]:
    while (event := await queue.get()) is not None:
        yield event


def _put(queue: asyncio.Queue[WorldEvent | None], event: WorldEvent | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(event)
