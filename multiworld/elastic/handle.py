"""An all-reduce under way, to be awaited or asked."""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Literal

from multiworld.elastic.epoch import Traffic

Status = Literal["pending", "done", "failed"]


class AllReduceHandle:
    """Made by `ElasticWorld.all_reduce_async`. Await it, or ask `done` and `status`.

    Raises, when awaited, BrokenWorldException when a member was lost; the tensor holds what it held then.
    Cancelling who awaits it gives this epoch up, for all members.

    Attributes:
        epoch, world_size: in which epoch it runs, and of how many members.
        traffic: bytes of tensors that went over the wire so far.
    """

    def __init__(self, work: Coroutine[Any, Any, None], epoch: int, world_size: int, traffic: Traffic) -> None:
        self.epoch = epoch
        self.world_size = world_size
        self.traffic = traffic
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(_mark_read)

    def done(self) -> bool:
        """Whether it completed or failed."""
        return self._task.done()

    @property
    def status(self) -> Status:
        if not self._task.done():
            return "pending"
        return "failed" if self._task.cancelled() or self._task.exception() is not None else "done"

    def __await__(self) -> Generator[Any, None, None]:
        return self._task.__await__()


def _mark_read(task: asyncio.Task[None]) -> None:
    """A handle that nobody awaits is no reason for asyncio to complain."""
    if not task.cancelled():
        task.exception()
