"""Which requests have begun and are not answered yet: who stops waits for them."""

import asyncio
import contextlib
from collections.abc import Iterator


class UnderWay:
    """Counts what runs within its blocks. Of one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """One more while the block runs."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            self._changed.set()

    async def none(self) -> None:
        """Wait until there is none."""
        while self.count:
            self._changed.clear()
            await self._changed.wait()
