"""The consumer's end of an edge: opens it when a tensor is first needed, and keeps it until one of the two ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from multiworld import AskError, Transport, World, WorldError, WorldManager, ask
from multiworld_serving.common.config.addresses import parse_address
from multiworld_serving.common.edges.metrics import EdgeMetrics
from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.inputs import RowRef, row_refs_tensor
from multiworld_serving.common.wire.join import WORLD_BACKEND, EdgeJoinRequest, JoinOffer
from multiworld_serving.common.wire.message import Header, Message, MessageKind, WireError

logger = logging.getLogger(__name__)

_PRODUCER_RANK = 0
_OPEN_S = 2.0
"""Longest time for opening an edge."""
_FETCH_S = 4.0
"""Longest time for one transfer over an open edge. A frozen producer is noticed earlier, by its heartbeats."""
_MAX_QUEUED = 4096
"""Fetches that wait for one producer."""


class EdgeError(Exception):
    """A tensor could not be fetched."""


class HolderUnreachableError(EdgeError):
    """No edge to the producer could be opened, or it broke.

    Attributes:
        holder: the producer; set by `Edges.fetch`.
    """

    holder = ""


class EdgeBrokenError(HolderUnreachableError):
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


class Edge:
    """The edge to one producer. Its task opens the world, performs the fetches in order, and ends when the edge breaks.

    Args:
        holder: the producer, as it announced itself: HOST:PORT/INCARNATION.
        consumer: name of this process, for the producer's log.
        manager: hosts the worlds.
        bind_host: local address of the connections; empty lets the kernel choose. The manager must have the same.
        on_ended: called when the edge has ended, before its fetches fail.
    """

    def __init__(
        self,
        holder: str,
        consumer: str,
        manager: WorldManager,
        secret: bytes,
        metrics: EdgeMetrics,
        bind_host: str,
        on_ended: Callable[[Edge], object],
    ) -> None:
        self.holder = holder
        self.transport = Transport.TCP
        self._consumer = consumer
        self._manager = manager
        self._secret = secret
        self._metrics = metrics
        self._bind_host = bind_host
        self._on_ended = on_ended
        self._queue: deque[_Fetch] = deque()
        self._added = asyncio.Event()
        self._numbers = itertools.count(1)
        self._expected: tuple[int, torch.dtype, tuple[int, ...]] = (0, torch.uint8, ())
        self.task = asyncio.create_task(self._run())

    def fetch(
        self, refs: Sequence[RowRef], dtype: torch.dtype, shape: tuple[int, ...], *, take: bool
    ) -> asyncio.Future[Tensor]:
        """Queue a fetch; see `Edges.fetch`. Raises HolderUnreachableError if too many wait."""
        if len(self._queue) >= _MAX_QUEUED:
            raise HolderUnreachableError(f"{_MAX_QUEUED} fetches wait for {self.holder}")
        fetch = _Fetch(refs, dtype, shape, take, asyncio.get_running_loop().create_future())
        self._queue.append(fetch)
        self._added.set()
        return fetch.future

    async def _run(self) -> None:
        reason: EdgeError = HolderUnreachableError("this process stops")
        world: World | None = None
        try:
            world = await self.open()
            self._metrics.opened("received", 1)
            self.transport = world.transport
            await self._serve(Channel(world, _PRODUCER_RANK, self._check))
        except EdgeError as error:
            reason = error
        except (WorldError, TimeoutError) as error:
            reason = EdgeBrokenError(f"the edge to {self.holder} broke: {str(error) or 'no answer in time'}")
        except Exception as error:
            logger.exception("the edge to %s failed", self.holder)
            reason = HolderUnreachableError(f"the edge to {self.holder} failed: {type(error).__name__}")
        finally:
            self._on_ended(self)
            for fetch in self._queue:
                if not fetch.future.done():
                    fetch.future.set_exception(type(reason)(str(reason)))
            if world is not None:
                self._metrics.opened("received", -1)
                with contextlib.suppress(WorldError):
                    await self._manager.close_world(world.name)

    async def open(self) -> World:
        """Join a new world with the producer. Raises HolderUnreachableError."""
        try:
            location, _, incarnation = self.holder.rpartition("/")
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
                return await self._manager.initialize_world(
                    *(offer.world, 1, 2, WORLD_BACKEND),
                    addr=address.host,
                    port=address.port,
                    generation=offer.generation,
                    timeout=_OPEN_S,
                )
        except (AskError, PermissionError, WorldError, ValueError, OSError) as error:  # a TimeoutError is an OSError
            raise HolderUnreachableError(f"no edge to {self.holder}: {str(error) or type(error).__name__}") from error

    async def _serve(self, channel: Channel) -> NoReturn:
        """Perform fetches in their order until the edge breaks. Raises WorldError, TimeoutError."""
        while True:
            while self._queue:
                fetch = self._queue[0]
                if not fetch.future.done():
                    await self._perform(channel, fetch)
                self._queue.popleft()
                del fetch  # its future refers to the tensor
            self._added.clear()
            await self._added.wait()

    async def _perform(self, channel: Channel, fetch: _Fetch) -> None:
        number = next(self._numbers)
        self._expected = (number, fetch.dtype, fetch.shape)
        kind = MessageKind.TAKE_ROWS if fetch.take else MessageKind.FETCH_ROWS
        async with asyncio.timeout(_FETCH_S):
            await channel.send(Message(kind, number, row_refs_tensor(fetch.refs)))
            tensor = (await channel.receive_view()).payload
        if tensor is not None:
            self._metrics.transferred("received", self.transport, tensor.nbytes)
        if fetch.future.done():
            return  # its caller was cancelled
        if tensor is not None:
            fetch.future.set_result(tensor)
        else:
            fetch.future.set_exception(TensorGoneError(f"{self.holder} does not have it any more"))

    def _check(self, header: Header) -> None:
        """Reject an answer that was not asked for, before memory is allocated for it. Raises WireError."""
        number, dtype, shape = self._expected
        if header.batch != number or header.kind not in (MessageKind.ROWS, MessageKind.GONE):
            raise WireError(f"unexpected {header.kind.name} {header.batch} from a producer")
        if header.kind is MessageKind.GONE:
            header.require_no_payload()
        else:
            header.require_batch(dtype, shape[1:], shape[0], shape[0])
