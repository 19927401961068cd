"""Which requests have begun and are not answered yet: who stops waits for them."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Protocol


class Elsewhere(Protocol):
    """Where more requests may be under way."""

    @property
    def count(self) -> int:
        """How many, as far as is known here."""
        ...

    async def none(self) -> None:
        """Wait until there is none."""
        ...

    async def informed(self) -> None:
        """Wait until it is known there how the leader stands now."""
        ...


class UnderWay:
    """Counts what runs within its blocks. Of one event loop.

    Attributes:
        elsewhere: what is counted and waited for too.
    """

    def __init__(self) -> None:
        self.elsewhere: Elsewhere | None = None
        self._here = 0
        self._changed = asyncio.Event()

    @property
    def count(self) -> int:
        """How many there are."""
        return self._here + (self.elsewhere.count if self.elsewhere else 0)

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """One more while the block runs."""
        self._here += 1
        try:
            yield
        finally:
            self._here -= 1
            self._changed.set()

    async def informed(self) -> None:
        """Wait until it is known everywhere how the leader stands now."""
        if self.elsewhere is not None:
            await self.elsewhere.informed()

    async def none(self) -> None:
        """Wait until there is none. Those elsewhere first: they come here from there."""
        if self.elsewhere is not None:
            await self.elsewhere.none()
        while self._here:
            self._changed.clear()
            await self._changed.wait()
