"""A stream of the state changes of all worlds of a process."""

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
"""Unread events per reader. With more, the reader loses the oldest."""


@dataclass(frozen=True, slots=True)
class WorldEvent:
    """Reports a state change of one world.

    Attributes:
        cause, rank: the cause and the rank of the failed member (-1 if not known); None unless `kind` is "broken".
        at_s: time of the event, by `time.monotonic`.
    """

    kind: Literal["joined", "broken", "closed"]
    world_name: str
    generation: int
    cause: Cause | None = None
    rank: int | None = None
    at_s: float = field(default_factory=time.monotonic)


class EventStream:
    """Delivers every event to every reader, on the reader's event loop. `publish` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weak keys: when a reader drops its iterator, its queue is removed, even if it was never read.
        self._readers: weakref.WeakKeyDictionary[asyncio.Queue[WorldEvent | None], asyncio.AbstractEventLoop]
        self._readers = weakref.WeakKeyDictionary()

    def publish(self, event: WorldEvent | None) -> None:
        """Deliver `event` to all current readers. None ends their iterators."""
        with self._lock:
            readers = list(self._readers.items())
        for queue, loop in readers:
            with contextlib.suppress(RuntimeError):  # the event loop of this reader is closed
                loop.call_soon_threadsafe(_put, queue, event)

    def subscribe(self) -> AsyncIterator[WorldEvent]:
        """Return an iterator over all events from this call on. Call it on an event loop.

        At most 10000 unread events are kept; a slow reader loses the oldest.
        """
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
