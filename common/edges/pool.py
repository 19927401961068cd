"""The consumer's end of edges: opens an edge when a tensor is first needed, and keeps it until one of the two ends."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from multiworld import AskError, Transport, World, WorldError, WorldManager, ask
from multiworld_serving.common.config.addresses import parse_address
from multiworld_serving.common.edges.metrics import EdgeMetrics, transport_label
from multiworld_serving.common.wire import (
    MAX_EDGE_STATES,
    MAX_FETCH_ROWS,
    WORLD_BACKEND,
    Channel,
    EdgeJoinRequest,
    EdgeState,
    Header,
    JoinOffer,
    Message,
    MessageKind,
    RowRef,
    WireError,
    row_refs_tensor,
)

logger = logging.getLogger(__name__)

_PRODUCER_RANK = 0
_OPEN_S = 2.0
"""Longest time for opening an edge."""
_FETCH_S = 4.0
"""Longest time for one transfer over an open edge. A frozen producer is noticed earlier, by its heartbeats."""
_TOTAL_S = 6.0
"""Longest time for a fetch. Shorter than the leader's `hang_timeout_s`, so that a consumer is not blamed for a slow producer."""
_SHARE = 0.1
"""Weight of the last transfer in the mean time of an edge."""
_MAX_QUEUED = 4096
"""Fetches that wait for one producer."""


class EdgeError(Exception):
    """A tensor could not be fetched."""


class HolderUnreachableError(EdgeError):
    """No edge to the producer could be opened, or it broke.

    Attributes:
        holder: the producer; set by `EdgePool.fetch`.
    """

    holder = ""


class _EdgeBrokenError(HolderUnreachableError):
    """An open edge broke. A new one may work."""


class TensorGoneError(EdgeError):
    """The producer does not have the tensor any more."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """A fetch that waits. `shape` is that of the result."""

    refs: Sequence[RowRef]
    dtype: torch.dtype
    shape: tuple[int, ...]
    take: bool
    future: asyncio.Future[Tensor]

    def joins(self, other: _Fetch) -> bool:
        """Whether both can be one message."""
        return (self.dtype, self.shape[1:], self.take) == (other.dtype, other.shape[1:], other.take)


class EdgePool:
    """All edges on which this process fetches. Fetches that wait for the same producer share a message if their rows have the same form.

    Args:
        consumer: name of this process, for the producer's log.
        manager: hosts the worlds.
        bind_host: local address of the connections; empty lets the kernel choose. The manager must have the same.
    """

    def __init__(
        self, consumer: str, manager: WorldManager, secret: bytes, metrics: EdgeMetrics, bind_host: str = ""
    ) -> None:
        self._consumer = consumer
        self._manager = manager
        self._secret = secret
        self._metrics = metrics
        self._bind_host = bind_host
        self._edges: dict[str, _Edge] = {}

    def states(self) -> tuple[EdgeState, ...]:
        """The edges on which something was fetched, those with most bytes first; at most MAX_EDGE_STATES."""
        used = (edge for edge in self._edges.values() if edge.received_bytes)
        most = heapq.nlargest(MAX_EDGE_STATES, used, key=lambda edge: edge.received_bytes)
        return tuple(
            EdgeState(edge.holder, transport_label(edge.transport), edge.received_bytes, round(edge.fetch_s, 6))
            for edge in most
        )

    async def close(self) -> None:
        """End all edges. Waiting fetches raise."""
        tasks = [edge.task for edge in self._edges.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def fetch(
        self, holder: str, refs: Sequence[RowRef], dtype: torch.dtype, shape: tuple[int, ...], *, take: bool = False
    ) -> Tensor:
        """Fetch rows of tensors of one producer, concatenated.

        Args:
            holder: the producer, as it announced itself: HOST:PORT/INCARNATION.
            refs: at most 1024.
            shape: of the result: [rows, *sample shape].
            take: these rows are needed by nobody else; the producer may free them.
        If the edge breaks, the fetch is repeated once over a new one.
        Raises:
            HolderUnreachableError, TensorGoneError: other producers are not affected.
        Cancelling does not end the edge. A large result may lie in shared memory of the producer, which uses this memory again when all
        tensors over it are dropped. It may be written: this changes only the memory of this process.
        """
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(_TOTAL_S):
                try:
                    tensor, transport = await self._fetch(holder, refs, dtype, shape, take=take)
                except _EdgeBrokenError:
                    tensor, transport = await self._fetch(holder, refs, dtype, shape, take=take)
        except TimeoutError:
            self._metrics.failed("unreachable")
            late = HolderUnreachableError(f"{holder} did not send it within {_TOTAL_S:g} s")
            late.holder = holder
            raise late from None
        except TensorGoneError:
            self._metrics.failed("gone")
            raise
        except HolderUnreachableError as error:
            self._metrics.failed("unreachable")
            error.holder = holder
            raise
        self._metrics.fetched(time.monotonic() - began_s, transport)
        return tensor

    async def _fetch(
        self, holder: str, refs: Sequence[RowRef], dtype: torch.dtype, shape: tuple[int, ...], *, take: bool
    ) -> tuple[Tensor, Transport]:
        """Fetch over the edge to the producer; opens it if there is none. Raises HolderUnreachableError, TensorGoneError."""
        edge = self._edges.get(holder)
        if edge is None:
            edge = self._edges[holder] = _Edge(self, holder)
        fetch = _Fetch(refs, dtype, shape, take, asyncio.get_running_loop().create_future())
        edge.add(fetch)
        return await fetch.future, edge.transport

    async def open(self, holder: str) -> World:
        """Join a new world with the producer. Raises HolderUnreachableError."""
        try:
            location, _, incarnation = holder.rpartition("/")
            address = parse_address(location)
            request = EdgeJoinRequest(self._consumer, incarnation)
            async with asyncio.timeout(_OPEN_S):
                answer = await ask(
                    *(address.host, address.port, request.to_json()),
                    secret=self._secret,
                    timeout_s=_OPEN_S,
                    bind_host=self._bind_host,
                )
                offer = JoinOffer.from_json(answer)
                world = await self._manager.initialize_world(
                    *(offer.world, 1, 2, WORLD_BACKEND),
                    addr=address.host,
                    port=address.port,
                    generation=offer.generation,
                    timeout=_OPEN_S,
                )
        except (AskError, PermissionError, WorldError, ValueError, OSError) as error:  # a TimeoutError is an OSError
            raise HolderUnreachableError(f"no edge to {holder}: {str(error) or type(error).__name__}") from error
        self._metrics.opened("received", 1)
        return world

    def received(self, tensor: Tensor, transport: Transport) -> None:
        """Count a tensor that came over an edge."""
        self._metrics.transferred("received", transport, tensor.nbytes)

    async def close_world(self, world: World) -> None:
        """Close the world of an edge."""
        self._metrics.opened("received", -1)
        with contextlib.suppress(WorldError):
            await self._manager.close_world(world.name)

    def forget(self, edge: _Edge) -> None:
        """The next fetch opens a new edge."""
        if self._edges.get(edge.holder) is edge:
            del self._edges[edge.holder]


class _Edge:
    """The edge to one producer. Its task opens the world, performs the fetches in order, and ends when the edge breaks.

    Attributes:
        received_bytes: of tensors.
        fetch_s: mean time of recent transfers.
    """

    def __init__(self, pool: EdgePool, holder: str) -> None:
        self.holder = holder
        self._pool = pool
        self._queue: deque[_Fetch] = deque()
        self._current: list[_Fetch] = []
        self._added = asyncio.Event()
        self._numbers = itertools.count(1)
        self._expected: tuple[int, torch.dtype, tuple[int, ...]] = (0, torch.uint8, ())
        self.transport = Transport.TCP
        self.received_bytes = 0
        self.fetch_s = 0.0
        self.task = asyncio.create_task(self._run())

    def add(self, fetch: _Fetch) -> None:
        """Queue a fetch. Raises HolderUnreachableError if too many wait."""
        if len(self._queue) >= _MAX_QUEUED:
            raise HolderUnreachableError(f"{_MAX_QUEUED} fetches wait for {self.holder}")
        self._queue.append(fetch)
        self._added.set()

    async def _run(self) -> None:
        reason: EdgeError = HolderUnreachableError("this process stops")
        world: World | None = None
        try:
            world = await self._pool.open(self.holder)
            self.transport = world.transport
            await self._serve(Channel(world, _PRODUCER_RANK, self._check))
        except EdgeError as error:
            reason = error
        except (WorldError, TimeoutError) as error:
            reason = _EdgeBrokenError(f"the edge to {self.holder} broke: {str(error) or 'no answer in time'}")
        except Exception as error:
            logger.exception("the edge to %s failed", self.holder)
            reason = HolderUnreachableError(f"the edge to {self.holder} failed: {type(error).__name__}")
        finally:
            self._pool.forget(self)
            for fetch in (*self._current, *self._queue):
                if not fetch.future.done():
                    fetch.future.set_exception(type(reason)(str(reason)))
            if world is not None:
                await self._pool.close_world(world)

    async def _serve(self, channel: Channel) -> NoReturn:
        """Perform fetches until the edge breaks. Raises WorldError, TimeoutError."""
        while True:
            while self._queue:
                self._current = self._next_fetches()
                if self._current:
                    await self._perform(channel, self._current)
                self._current = []
            self._added.clear()
            await self._added.wait()

    def _next_fetches(self) -> list[_Fetch]:
        """Take the first fetch of the queue, and those after it that can be in the same message."""
        taken: list[_Fetch] = []
        rows = 0
        while self._queue:
            fetch = self._queue[0]
            if not fetch.future.done():
                rows += len(fetch.refs)
                if taken and (rows > MAX_FETCH_ROWS or not fetch.joins(taken[0])):
                    break
                taken.append(fetch)
            self._queue.popleft()
        return taken

    async def _perform(self, channel: Channel, fetches: list[_Fetch]) -> None:
        tensor = await self._exchange(channel, fetches)
        if tensor is None and len(fetches) > 1:  # find out which one is gone
            for fetch in fetches:
                await self._perform(channel, [fetch])
        elif tensor is None:
            if not fetches[0].future.done():
                fetches[0].future.set_exception(TensorGoneError(f"{self.holder} does not have it any more"))
        else:
            parts = (tensor,) if len(fetches) == 1 else torch.split(tensor, [fetch.shape[0] for fetch in fetches])
            for fetch, part in zip(fetches, parts, strict=True):
                if not fetch.future.done():
                    fetch.future.set_result(part)

    async def _exchange(self, channel: Channel, fetches: list[_Fetch]) -> Tensor | None:
        """Fetch everything in one message; None if something of it is gone."""
        first = fetches[0]
        number = next(self._numbers)
        shape = (sum(fetch.shape[0] for fetch in fetches), *first.shape[1:])
        self._expected = (number, first.dtype, shape)
        kind = MessageKind.TAKE_ROWS if first.take else MessageKind.FETCH_ROWS
        refs = [ref for fetch in fetches for ref in fetch.refs]
        began_s = time.monotonic()
        async with asyncio.timeout(_FETCH_S):
            await channel.send(Message(kind, number, row_refs_tensor(refs)))
            tensor = (await channel.receive_view()).payload
        if tensor is not None:
            self._pool.received(tensor, self.transport)
            took_s = time.monotonic() - began_s
            self.fetch_s = took_s if not self.received_bytes else (1 - _SHARE) * self.fetch_s + _SHARE * took_s
            self.received_bytes += tensor.nbytes
        return tensor

    def _check(self, header: Header) -> None:
        """Reject an answer that was not asked for, before memory is allocated for it. Raises WireError."""
        number, dtype, shape = self._expected
        if header.batch != number or header.kind not in (MessageKind.ROWS, MessageKind.GONE):
            raise WireError(f"unexpected {header.kind.name} {header.batch} from a producer")
        if header.kind is MessageKind.GONE:
            header.require_no_payload()
        else:
            header.require_batch(dtype, shape[1:], shape[0], shape[0])
