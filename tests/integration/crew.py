"""Eight managers in one process that are members of the same worlds. For tests of results; tests of failures use separate processes."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from multiworld import World, WorldManager

MAX_SIZE = 8

T = TypeVar("T")
Part = Callable[[WorldManager, World], Awaitable[T]]
"""The code of one rank."""


class Crew:
    """Worlds of sizes 1 to 8, with and without `verify_collectives`, created on first use and shared by the tests of a module."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.managers = [WorldManager(heartbeat_timeout_s=60.0) for _ in range(MAX_SIZE)]
        self._port = self.managers[0].listen()

    def close(self) -> None:
        for manager in self.managers:
            for name in manager.worlds:
                manager.remove_world(name)
        for manager in self.managers:
            manager.cleanup()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def await_(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        """Run a coroutine on the crew's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def run(self, size: int, part: Part[T], *, verified: bool = False) -> list[T]:
        """Run a function on every rank of a world of `size` concurrently and return all results."""
        return self.await_(self._run(size, part, verified))

    async def worlds(self, size: int, verified: bool) -> list[World]:
        """The worlds of this kind; new ones if an earlier test has broken them."""
        name, here = f"{'verified' if verified else 'unverified'}-{size}", self.managers[:size]
        if any(name not in manager.worlds or manager.worlds[name].state.ended for manager in here):
            for manager in here:
                if name in manager.worlds:
                    manager.remove_world(name)
            await asyncio.gather(
                *(
                    manager.initialize_world(name, rank, size, port=self._port, verify_collectives=verified)
                    for rank, manager in enumerate(here)
                )
            )
        return [manager.world(name) for manager in here]

    async def _run(self, size: int, part: Part[T], verified: bool) -> list[T]:
        worlds = await self.worlds(size, verified)
        return list(
            await asyncio.gather(
                *(part(manager, world) for manager, world in zip(self.managers[:size], worlds, strict=True))
            )
        )
