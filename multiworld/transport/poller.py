"""Polls the connections that one event loop serves, with an epoll instance that the loop watches through one descriptor.

Only the thread of an event loop may change which sockets it watches, but any thread may change an epoll instance. A world can
therefore be closed, and a message sent, while its event loop is blocked or has ended.
"""

import asyncio
import contextlib
import os
import select
import weakref
from collections.abc import Callable
from functools import partial


class Poller:
    """The sockets that one event loop serves. Construct it on the loop's thread; all methods may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._loop = weakref.ref(loop)
        loop.add_reader(self._epoll.fileno(), self._on_ready)

    def is_abandoned(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether this poller belongs to another event loop than `loop`, which does not run and so serves no socket."""
        own = self._loop()
        return own is not loop and (own is None or not own.is_running())

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call `callback` on the event loop; never if the loop is closed. Does not block."""
        loop = self._loop()
        if loop is None:
            return
        here = asyncio._get_running_loop() is loop
        with contextlib.suppress(RuntimeError):
            (loop.call_soon if here else loop.call_soon_threadsafe)(callback)

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> None:
        """Call `callback` on the event loop after `delay_s` seconds; never if the loop is closed. Does not block."""
        if (loop := self._loop()) is not None:
            self.call_soon(partial(loop.call_later, delay_s, callback))

    def register(self, fd: int, on_event: Callable[[int], None], mask: int) -> None:
        """Call `on_event` with the events when one in `mask` has occurred, and again while data remains. It must not raise.

        Raises OSError when the kernel refuses.
        """
        self._handlers[fd] = on_event
        self._epoll.register(fd, mask)

    def modify(self, fd: int, mask: int) -> None:
        """Change the epoll events that a registered socket is polled for."""
        self._epoll.modify(fd, mask)

    def unregister(self, fd: int) -> None:
        """Stop polling a socket. Call it before the descriptor is closed."""
        del self._handlers[fd]
        self._epoll.unregister(fd)

    def _on_ready(self) -> None:
        """Call each ready handler once, then return to the event loop so that its other callbacks run."""
        for fd, mask in self._epoll.poll(0):
            if on_event := self._handlers.get(fd):  # an earlier handler of this round may have unregistered it
                on_event(mask)


_pollers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Poller] = weakref.WeakKeyDictionary()
# A forked child shares the epoll instances of its parent and must not change them.
os.register_at_fork(after_in_child=_pollers.clear)


def poller_of(loop: asyncio.AbstractEventLoop) -> Poller:
    """Return the poller of this event loop; it lives as long as the loop. Call it on the loop's thread."""
    poller = _pollers.get(loop)
    if poller is None:
        poller = _pollers[loop] = Poller(loop)
    return poller
