"""The producer's end of edges: accepts consumers on a port, and sends them the tensors of the store."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from typing import NoReturn

import torch

from multiworld import AskError, Transport, World, WorldError, WorldManager
from multiworld_serving.common.edges.metrics import EdgeMetrics
from multiworld_serving.common.edges.store import TensorStore
from multiworld_serving.common.wire.channel import Channel
from multiworld_serving.common.wire.inputs import MAX_FETCH_ROWS, row_refs
from multiworld_serving.common.wire.join import WORLD_BACKEND, EdgeJoinRequest, JoinOffer
from multiworld_serving.common.wire.message import Header, Message, MessageKind, WireError

logger = logging.getLogger(__name__)

_CONSUMER_RANK = 1
_MAX_EDGES = 1024
_JOIN_S = 5.0
"""Longest wait for a consumer to join the world that it was offered."""
_SEND_S = 20.0
"""Longest time for sending one answer; then the edge breaks, so that a consumer that does not read holds no tensor."""


class EdgeServer:
    """Answers fetches. Call `listen` first and `close` at the end.

    Args:
        manager: hosts the worlds; not used for other worlds.
        incarnation: of this process. A consumer that asks for another one is refused.

    Attributes:
        port: 0 until `listen`.
    """

    def __init__(self, store: TensorStore, manager: WorldManager, incarnation: str, metrics: EdgeMetrics) -> None:
        self.port = 0
        self._store = store
        self._manager = manager
        self._incarnation = incarnation
        self._metrics = metrics
        self._host = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._generations = itertools.count(1)

    def listen(self, host: str, port: int) -> None:
        """Listen on `host`; port 0 takes a free one. Raises OSError."""
        self._host, self.port = host, self._manager.listen(host, port)
        self._manager.answer(host, self.port, self._offer)

    async def close(self) -> None:
        """End all edges."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _offer(self, question: str, _host: str) -> bytes:
        try:
            request = EdgeJoinRequest.from_json(question)
        except WireError as error:
            raise AskError(str(error)) from error
        if not secrets.compare_digest(request.incarnation, self._incarnation):
            raise AskError("the process that kept these tensors has ended")
        if len(self._tasks) >= _MAX_EDGES:
            raise AskError(f"this process has {_MAX_EDGES} edges already")
        generation = next(self._generations)
        name = f"edge:{self._incarnation}:{generation}"
        task = asyncio.create_task(self._serve(request.consumer, name, generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return JoinOffer(name, generation).to_json().encode()

    async def _serve(self, consumer: str, name: str, generation: int) -> None:
        try:
            world = await self._manager.initialize_world(
                *(name, 0, 2, WORLD_BACKEND),
                addr=self._host,
                port=self.port,
                generation=generation,
                timeout=_JOIN_S,
            )
        except (WorldError, OSError) as error:
            logger.info("consumer=%s has not opened its edge: %s", consumer, error)
            return
        self._metrics.opened("sent", 1)
        logger.debug("edge=%s consumer=%s opened", name, consumer)
        try:
            await self._answer(world)
        except (WorldError, TimeoutError) as ending:
            logger.debug("edge=%s consumer=%s ended: %s", name, consumer, ending)
        finally:
            self._metrics.opened("sent", -1)
            with contextlib.suppress(WorldError):
                await self._manager.close_world(name)

    async def _answer(self, world: World) -> NoReturn:
        """Answer fetches in their order until the edge ends. Raises WorldError; TimeoutError if the consumer does not read."""
        channel = Channel(world, _CONSUMER_RANK, _check)
        allocate = world.allocate if world.transport is Transport.SHARED_MEMORY else None
        while True:
            message = await channel.receive()
            assert message.payload is not None, "`_check` requires it"
            refs = row_refs(message.payload)
            found = self._store.rows(refs, allocate)
            async with asyncio.timeout(_SEND_S):
                if found is None:
                    await channel.send(Message(MessageKind.GONE, message.batch))
                    continue
                await channel.send(Message(MessageKind.ROWS, message.batch, found))
            self._metrics.transferred("sent", world.transport, found.nbytes)
            if message.kind is MessageKind.TAKE_ROWS:
                self._store.take(refs)
            del found


def _check(header: Header) -> None:
    if header.kind not in (MessageKind.FETCH_ROWS, MessageKind.TAKE_ROWS):
        raise WireError(f"unexpected {header.kind.name} from a consumer")
    header.require_batch(torch.int64, (2,), 1, MAX_FETCH_ROWS)
