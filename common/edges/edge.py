"""The consumer's end of an edge: opened when a tensor is first needed, and kept until one of the two ends."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import torch
from torch import Tensor

from multiworld import AskError, World, WorldError
from multiworld_serving.common.edges.metrics import EdgeMetrics
from multiworld_serving.common.wire.inputs import Fetch, RowsLostError

logger = logging.getLogger(__name__)

_PRODUCER_RANK = 0
_FETCH_S = 4.0
"""Longest time for one transfer over an open edge. A frozen producer is noticed earlier, by its heartbeats."""
_LATE_S = 0.1
"""A transfer that is needed by a client is late after this time. A network may be slow, so the heartbeats must be late as well."""
_MAX_QUEUED = 4096
"""Fetches that wait for one producer."""
_EXPECTED = (AskError, WorldError, ValueError, OSError)
"""Errors of a producer that ends, refuses or lies, or that cannot be reached in time."""


def rows_head(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    """The header of a message with these rows. If the producer does not have them, the header is empty."""
    return f"{dtype}{list(shape)}".encode()


class Edge:
    """The edge to one producer. The first fetch opens it. One fetch is performed after another. If the edge breaks, all of them fail.

    Args:
        holder: the producer, as it announced itself: HOST:PORT/INCARNATION.
        open_world: joins a new world with the producer, or raises an error.
        on_ended: called when the edge has ended, before its fetches fail.
        silent_s: a producer may be frozen when no heartbeat has arrived for this time.

    Attributes:
        tasks: of the fetches.
        world: of the two ends; None until it is open.
    """

    def __init__(
        self,
        holder: str,
        open_world: Callable[[str], Awaitable[World]],
        on_ended: Callable[[Edge], object],
        metrics: EdgeMetrics,
        silent_s: float,
    ) -> None:
        self.holder = holder
        self.tasks: set[asyncio.Task[Tensor]] = set()
        self._open_world = open_world
        self._on_ended = on_ended
        self._metrics = metrics
        self._silent_s = silent_s
        self._turn = asyncio.Lock()
        self.world: World | None = None
        self._ending = ""

    async def fetch(self, fetch: Fetch, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """See `Edges.fetch`. If it is cancelled, the transfer still completes: otherwise the edge would break."""
        if len(self.tasks) >= _MAX_QUEUED:
            raise RowsLostError(f"{_MAX_QUEUED} fetches wait for {self.holder}")
        task = asyncio.create_task(self._fetch(fetch, dtype, shape))
        self.tasks.add(task)
        task.add_done_callback(self._fetched)
        while fetch.take and not (await asyncio.wait((task,), timeout=_LATE_S))[0]:
            if self.world is not None and self.world.silence_s() > self._silent_s:
                raise RowsLostError(f"{self.holder} is silent")
        return await asyncio.shield(task)

    def _fetched(self, task: asyncio.Task[Tensor]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may wait for it any more

    async def _fetch(self, fetch: Fetch, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        async with self._turn:
            if self._ending:
                raise RowsLostError(self._ending)
            try:
                if self.world is None:
                    self.world = await self._open_world(self.holder)
                tensor = await self._transfer(self.world, fetch, dtype, shape)
            except Exception as error:
                if not isinstance(error, _EXPECTED):
                    logger.exception("the edge to %s failed", self.holder)
                what = "cannot be opened" if self.world is None else "broke"
                self._ending = f"the edge to {self.holder} {what}: {str(error) or type(error).__name__}"
                self._on_ended(self)
                raise RowsLostError(self._ending) from error
        if tensor is None:
            raise RowsLostError(f"{self.holder} does not have it any more")
        return tensor

    async def _transfer(self, world: World, fetch: Fetch, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor | None:
        """The rows; None if the producer does not have them. Raises WorldError, TimeoutError."""
        expected, size_bytes = rows_head(dtype, shape), math.prod(shape) * dtype.itemsize

        def check(header: bytes, size: int) -> None:
            """Reject an answer that was not asked for, before memory is allocated for it."""
            found = header.rstrip(b"\0")
            if (found, size) not in ((expected, size_bytes), (b"", 0)):
                raise ValueError(f"{found!r} with {size} bytes from a producer; expected {expected!r}")

        async with asyncio.timeout(_FETCH_S):
            question = torch.frombuffer(bytearray(msgspec.msgpack.encode(fetch)), dtype=torch.uint8)
            world.start_send_message(b"", question, _PRODUCER_RANK)
            view = await world.recv_view(check, _PRODUCER_RANK)
        if not view.header.rstrip(b"\0"):
            return None
        self._metrics.bytes["received", world.transport].inc(size_bytes)
        return view.data.view(dtype).view(shape)
