"""Counts the open requests, so that shutdown and unloading can wait for them."""

import asyncio
from typing import Protocol


class RemoteOpenRequests(Protocol):
    """Open requests in other processes."""

    async def wait_idle(self) -> None:
        """Wait until there are none."""
        ...

    async def sync_state(self) -> None:
        """Wait until the other processes know the current state of the leader."""
        ...


class OpenRequests:
    """Counts open requests: those that have begun and are not answered. For one event loop.

    Attributes:
        count: of this process.
        remote: further requests to wait for.
    """

    def __init__(self) -> None:
        self.remote: RemoteOpenRequests | None = None
        self.count = 0
        self._changed = asyncio.Event()

    def begin(self) -> None:
        """Count one request, until `end`."""
        self.count += 1

    def end(self) -> None:
        """A request has ended."""
        self.count -= 1
        self._changed.set()

    async def sync_state(self) -> None:
        """Wait until all other processes know the current state of the leader."""
        if self.remote is not None:
            await self.remote.sync_state()

    async def wait_idle(self) -> None:
        """Wait until no request is open. Remote requests first, because they cause local ones."""
        if self.remote is not None:
            await self.remote.wait_idle()
        while self.count:
            self._changed.clear()
            await self._changed.wait()
