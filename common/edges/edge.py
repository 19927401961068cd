"""The consumer's end of an edge: opened when a tensor is first needed, and kept until one of the two ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence

import torch
from torch import Tensor

from multiworld import AskError, Transport, World, WorldError
from multiworld_serving.common.edges.metrics import EdgeMetrics
from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.inputs import RowRef, RowsLostError, row_refs_tensor
from multiworld_serving.common.wire.message import Message, MessageKind, WireError

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


class Edge:
    """The edge to one producer. The first fetch opens it. One fetch is performed after another. If the edge breaks, all of them fail.

    Args:
        holder: the producer, as it announced itself: HOST:PORT/INCARNATION.
        open_world: joins a new world with the producer, or raises an error.
        on_ended: called when the edge has ended, before its fetches fail.
        silent_s: a producer may be frozen when no heartbeat has arrived for this time.

    Attributes:
        tasks: of the fetches.
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
        self.transport = Transport.TCP
        self.tasks: set[asyncio.Task[Tensor]] = set()
        self._open_world = open_world
        self._on_ended = on_ended
        self._metrics = metrics
        self._silent_s = silent_s
        self._turn = asyncio.Lock()
        self._channel: Channel | None = None
        self._ending = ""
        self._numbers = itertools.count(1)
        self._expected: tuple[int, torch.dtype, tuple[int, ...]] = (0, torch.uint8, ())

    @property
    def world(self) -> World | None:
        """Of the two ends, once it is open."""
        return None if self._channel is None else self._channel.world

    async def fetch(self, refs: Sequence[RowRef], dtype: torch.dtype, shape: tuple[int, ...], *, take: bool) -> Tensor:
        """See `Edges.fetch`. If it is cancelled, the transfer still completes: otherwise the edge would break."""
        if len(self.tasks) >= _MAX_QUEUED:
            raise RowsLostError(f"{_MAX_QUEUED} fetches wait for {self.holder}")
        task = asyncio.create_task(self._fetch(refs, dtype, shape, take=take))
        self.tasks.add(task)
        task.add_done_callback(self._fetched)
        while take and not (await asyncio.wait((task,), timeout=_LATE_S))[0]:
            if self._channel is not None and self._channel.world.silence_s() > self._silent_s:
                raise RowsLostError(f"{self.holder} is silent")
        return await asyncio.shield(task)

    def _fetched(self, task: asyncio.Task[Tensor]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # nobody may wait for it any more

    async def _fetch(self, refs: Sequence[RowRef], dtype: torch.dtype, shape: tuple[int, ...], *, take: bool) -> Tensor:
        async with self._turn:
            if self._ending:
                raise RowsLostError(self._ending)
            try:
                if self._channel is None:
                    world = await self._open_world(self.holder)
                    self._channel, self.transport = Channel(world, _PRODUCER_RANK, self._check), world.transport
                tensor = await self._transfer(self._channel, refs, dtype, shape, take=take)
            except Exception as error:
                if not isinstance(error, _EXPECTED):
                    logger.exception("the edge to %s failed", self.holder)
                what = "cannot be opened" if self._channel is None else "broke"
                self._ending = f"the edge to {self.holder} {what}: {str(error) or type(error).__name__}"
                self._on_ended(self)
                raise RowsLostError(self._ending) from error
        if tensor is None:
            raise RowsLostError(f"{self.holder} does not have it any more")
        return tensor

    async def _transfer(
        self, channel: Channel, refs: Sequence[RowRef], dtype: torch.dtype, shape: tuple[int, ...], *, take: bool
    ) -> Tensor | None:
        """The rows; None if the producer does not have them. Raises WorldError, TimeoutError."""
        number = next(self._numbers)
        self._expected = number, dtype, shape
        kind = MessageKind.TAKE_ROWS if take else MessageKind.FETCH_ROWS
        async with asyncio.timeout(_FETCH_S):
            await channel.send(Message(kind, number, row_refs_tensor(refs)))
            tensor = (await channel.receive(copy=False)).payload
        if tensor is not None:
            self._metrics.bytes["received", self.transport].inc(tensor.nbytes)
        return tensor

    def _check(self, message: Message) -> None:
        """Reject an answer that was not asked for, before memory is allocated for it. Raises WireError."""
        number, dtype, shape = self._expected
        if message.number != number or message.kind not in (MessageKind.ROWS, MessageKind.GONE):
            raise WireError(f"unexpected {message.kind.name} {message.number} from a producer")
        if message.kind is MessageKind.GONE:
            message.require_no_payload()
        else:
            message.require_batch(dtype, shape[1:], shape[0], shape[0])
