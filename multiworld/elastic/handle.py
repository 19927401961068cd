"""The handle of an all-reduce in progress."""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Literal

from multiworld.elastic.allreduce.channel import Traffic

Status = Literal["pending", "done", "failed"]


class AllReduceHandle:
    """An all-reduce started by `ElasticWorld.all_reduce_async`. Await it, or poll `done` and `status`.

    Awaiting it raises BrokenWorldException when a member is lost; the tensor then holds its original value.
    Cancelling the task that awaits it fails this epoch for all members.

    Attributes:
        epoch: number of the epoch in which it runs.
        world_size: number of members of that epoch.
        traffic: bytes of tensors sent and received so far.
    """

    def __init__(self, work: Coroutine[Any, Any, None], epoch: int, world_size: int, traffic: Traffic) -> None:
        self.epoch = epoch
        self.world_size = world_size
        self.traffic = traffic
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(_mark_read)

    def done(self) -> bool:
        """Return whether it completed or failed."""
        return self._task.done()

    @property
    def status(self) -> Status:
        """ "pending", "done" or "failed"."""
        if not self._task.done():
            return "pending"
        return "failed" if self._task.cancelled() or self._task.exception() is not None else "done"

    def __await__(self) -> Generator[Any, None, None]:
        return self._task.__await__()


def _mark_read(task: asyncio.Task[None]) -> None:
    """Retrieve the exception, so that asyncio does not log it if the handle is never awaited."""
    if not task.cancelled():
        task.exception()
