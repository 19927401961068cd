"""Where the lines of an event loop plug in: one epoll of our own, which the loop watches through one descriptor.

Only a loop's own thread may tell it which sockets to watch; an epoll may be told by any thread. So a world can be freed, and a message
sent, while its loop stands still or has ended, and every loop is alike to us.
"""

import asyncio
import os
import select
import weakref
from typing import Protocol


class Plug(Protocol):
    """What is plugged in."""

    def on_event(self, mask: int) -> None:
        """Its socket can be read or written. Must not raise; called again for what it leaves."""


class Board:
    """The sockets that one event loop serves. All but the making of it may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._epoll = select.epoll()
        self._plugs: dict[int, Plug] = {}
        self._loop = weakref.ref(loop)
        loop.add_reader(self._epoll.fileno(), self._on_ready)

    def serves(self, loop: asyncio.AbstractEventLoop) -> bool:
        return self._loop() is loop

    @property
    def running(self) -> bool:
        """Whether its loop runs: nobody else would serve what is plugged in."""
        loop = self._loop()
        return loop is not None and loop.is_running()

    def plug(self, fd: int, plug: Plug, mask: int) -> None:
        self._plugs[fd] = plug
        self._epoll.register(fd, mask)

    def modify(self, fd: int, mask: int) -> None:
        self._epoll.modify(fd, mask)

    def unplug(self, fd: int) -> None:
        """Before the descriptor is closed."""
        del self._plugs[fd]
        self._epoll.unregister(fd)

    def _on_ready(self) -> None:
        """Each gets its turn once; then the loop's other callbacks have theirs."""
        for fd, mask in self._epoll.poll(0):
            if plug := self._plugs.get(fd):  # an earlier one of this round may have ended its world
                plug.on_event(mask)


_boards: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Board] = weakref.WeakKeyDictionary()
os.register_at_fork(
    after_in_child=_boards.clear
)  # an epoll that a child shares with its parent is not the child's to change


def board_of(loop: asyncio.AbstractEventLoop) -> Board:
    """The board of this loop, which lives as long as the loop. Call it on the loop's thread."""
    board = _boards.get(loop)
    if board is None:
        board = _boards[loop] = Board(loop)
    return board
