"""The data edges of one process: what it keeps for others, and how it fetches from them."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec
import torch
from torch import Tensor

from multiworld import AskError, Transport, World, WorldError, WorldManager
from multiworld_serving.common.config.addresses import Address, parse_address
from multiworld_serving.common.config.edges import EdgePortSettings
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.edges.edge import Edge, rows_head
from multiworld_serving.common.edges.metrics import EdgeMetrics
from multiworld_serving.common.edges.store import TensorStore
from multiworld_serving.common.wire.inputs import MAX_FETCH_ROWS, Fetch, RowRef, RowsLostError, Source
from multiworld_serving.common.wire.join import EdgeJoinRequest, JoinOffer
from multiworld_serving.common.wire.protocol import WireError

_CONSUMER_RANK = 1
_FETCH = msgspec.msgpack.Decoder(Fetch)
_MAX_FETCH_BYTES = 32 * MAX_FETCH_ROWS
_MAX_SERVED = 1024
"""Edges on which others fetch from this process."""
_OPEN_S = 2.0
"""Longest time for opening an edge."""
_JOIN_S = 5.0
"""Longest wait for a consumer to join the world that it was offered."""
_SEND_S = 20.0
"""Longest time for sending one answer; then the edge breaks, so that a consumer that does not read holds no tensor."""
_POLL_S = 0.02
_TOTAL_S = 6.0
"""Longest time for a fetch. Shorter than the leader's `hang_timeout_s`, so that a consumer is not blamed for a slow producer."""
_SILENT_HEARTBEATS = 1.25
"""A producer that does not answer a client's fetch is silent when its heartbeat is late by a quarter of its interval."""
_MAX_KEPT_BYTES = 1 << 30
"""Of tensors that a process keeps for others to fetch. Above it, tensors go through a leader."""

logger = logging.getLogger(__name__)


class Edges:
    """Owns the store, and the edges on which this process fetches and others fetch from it. Use as `async with`: it listens on entry.

    Args:
        name: of this process.
        register: see `register_shared_memory` of `WorldManager`.
        host: the local address to listen on; with an advertised address, a loopback address is replaced by all interfaces.

    Attributes:
        holder: how other processes refer to this one: HOST:PORT/INCARNATION. Final after entry. The incarnation is random, so a
            process that is started again on the same port never answers for this one.
    """

    def __init__(
        self,
        name: str,
        host: str,
        settings: EdgePortSettings,
        metrics: EdgeMetrics,
        bind_host: str = "",
        register: Callable[[int, int, bool], Callable[[], None]] | None = None,
    ) -> None:
        self.holder = ""
        self.store = TensorStore(_MAX_KEPT_BYTES, metrics, settings.edge_min_bytes)
        self._settings = settings
        loopback = ipaddress.ip_address(host).is_loopback
        self._host = "0.0.0.0" if loopback and settings.advertise_edge is not None else host  # noqa: S104 - asked for
        self._incarnation = secrets.token_hex(8)
        self._name = name
        self._bind_host = bind_host
        self._silent_s = _SILENT_HEARTBEATS * settings.heartbeats["heartbeat_interval_s"]
        self._secrets = settings.edge_secrets
        self._manager = WorldManager(
            secret=self._secrets[0],
            verify_collectives=False,
            **settings.heartbeats,
            bind_host=bind_host,
            on_shared_memory_missing=metrics.shared_memory_missing.inc,
            register_shared_memory=register,
        )
        self._metrics = metrics
        self._edges: dict[str, Edge] = {}
        """Edges on which this process fetches, by producer."""
        self._served: set[asyncio.Task[None]] = set()
        """Tasks of the edges on which others fetch."""
        self._generations = itertools.count(1)
        self._port = 0

    async def __aenter__(self) -> Edges:
        """Listen. Raises UserError if the port is not available."""
        settings = self._settings
        try:
            self._port = self._manager.listen(self._host, settings.edge_port)
        except OSError as error:
            await self._manager.aclose()
            raise UserError(
                f"--edge-port {settings.edge_port} on {self._host} cannot be used: {error}; choose another one"
            ) from error
        self._manager.answer(self._host, self._port, self._offer)
        self._manager.set_accepted_secrets(*self._secrets)
        address = Address(self._host, self._port)
        if settings.advertise_edge is not None:
            address = parse_address(settings.advertise_edge, default_port=self._port)
        self.holder = f"{address}/{self._incarnation}"
        logger.debug("edges listen address=%s", address)
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._served, *(task for edge in self._edges.values() for task in edge.tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._manager.aclose()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialized memory for a tensor to keep. Consumers on this host can read it in place if it is in shared memory, which it is
        unless it is small or no shared memory is left. May be called on any thread."""
        return self._manager.allocate(shape, dtype)

    async def wait_fetched(self, timeout_s: float) -> None:
        """Wait until no tensor is kept any more, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self.store):  # noqa: ASYNC110 - once, when the process ends
                    await asyncio.sleep(_POLL_S)

    async def fetch_rows(
        self,
        sources: Sequence[Source],
        rows: int,
        dtype: torch.dtype,
        row_shape: tuple[int, ...],
        rest: tuple[Tensor | None, Sequence[int]] = (None, ()),
        *,
        take: bool = False,
    ) -> Tensor:
        """A tensor [rows, *row_shape] from rows of several producers, which are fetched at the same time. Rows that nobody has are zeros.

        Args:
            rest: rows that were not kept, and their positions. Rows of bytes may be shorter.
            take: see `fetch`.
        Raises:
            RowsLostError: a producer could not send its rows.
        """
        shapes = [(len(source.at), *row_shape) for source in sources]
        fetches = [
            self.fetch(source.holder, source.refs, dtype, shape, take=take)
            for source, shape in zip(sources, shapes, strict=True)
        ]
        found = await asyncio.gather(*fetches, return_exceptions=True) if fetches else ()
        parts: list[tuple[Sequence[int], Tensor]] = []
        for source, part in zip(sources, found, strict=True):
            if isinstance(part, BaseException):
                raise part
            parts.append((source.at, part))
        if rest[0] is not None:
            parts.append((rest[1], rest[0]))
        if len(parts) == 1 and tuple(parts[0][0]) == tuple(range(rows)) and parts[0][1].shape[1:] == row_shape:
            return parts[0][1]  # not copied
        batch = torch.zeros((rows, *row_shape), dtype=dtype)
        for at, part in parts:
            if part.shape[1:] == row_shape:
                batch[torch.tensor(at)] = part
            else:  # shorter rows of bytes
                batch[torch.tensor(at), : part.shape[1]] = part
        return batch

    async def fetch(
        self, holder: str, refs: Sequence[RowRef], dtype: torch.dtype, shape: tuple[int, ...], *, take: bool = False
    ) -> Tensor:
        """Fetch rows of tensors of one producer, concatenated. No process fetches what it keeps itself.

        Args:
            holder: the producer, as it announced itself: HOST:PORT/INCARNATION.
            refs: at most 1024.
            shape: of the result: [rows, *sample shape].
            take: a client waits for these rows, and nobody else needs them; the producer may free them.
        Raises:
            RowsLostError: the producer cannot be reached, is silent, or has freed a tensor. Other producers are not affected.
        Cancelling does not end the edge. A large result may lie in shared memory of the producer, which uses this memory again when all
        tensors over it are dropped. It may be written: this changes only the memory of this process.
        """
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(_TOTAL_S):
                edge = self._edge(holder)
                row_bytes = shape[1] if dtype == torch.uint8 and len(shape) == 2 else 0
                tensor = await edge.fetch(Fetch(tuple(refs), take, row_bytes), dtype, shape)
        except (RowsLostError, TimeoutError) as error:
            self._metrics.fetches["failed"].inc()
            raise RowsLostError(str(error) or f"{holder} did not send it within {_TOTAL_S:g} s") from error
        self._metrics.fetches["fetched"].inc()
        assert edge.world is not None, "it was fetched"
        self._metrics.fetch_s[edge.world.transport].observe(time.monotonic() - began_s)
        return tensor

    def _edge(self, holder: str) -> Edge:
        """The edge to a producer; a new one if the previous one has broken."""
        edge = self._edges.get(holder)
        if edge is not None and edge.world is not None and edge.world.state.ended and not edge.tasks:
            self._forget(edge)
            edge = None
        if edge is None:
            edge = self._edges[holder] = Edge(holder, self._open_world, self._forget, self._metrics, self._silent_s)
        return edge

    async def _open_world(self, holder: str) -> World:
        """Join a new world with a producer. Raises AskError, WorldError, ValueError, OSError."""
        location, _, incarnation = holder.rpartition("/")
        address = parse_address(location)
        async with asyncio.timeout(_OPEN_S):
            request = EdgeJoinRequest(self._name, incarnation).to_json()
            offer = await JoinOffer.ask(
                address, request, secret=self._secrets[0], timeout_s=_OPEN_S, bind_host=self._bind_host
            )
            world = await offer.form(self._manager, 1, address, _OPEN_S)
        self._metrics.open["received"].inc()
        return world

    def _forget(self, edge: Edge) -> None:
        """An edge has ended: the next fetch opens a new one."""
        del self._edges[edge.holder]
        if edge.world is not None:
            self._metrics.open["received"].dec()
            with contextlib.suppress(WorldError):
                self._manager.remove_world(edge.world.name)

    # What others fetch here.

    async def _offer(self, question: str, _host: str) -> bytes:
        try:
            request = EdgeJoinRequest.from_json(question)
        except WireError as error:
            raise AskError(str(error)) from error
        if not secrets.compare_digest(request.incarnation, self._incarnation):
            raise AskError("the process that kept these tensors has ended")
        if len(self._served) >= _MAX_SERVED:
            raise AskError(f"this process has {_MAX_SERVED} edges already")
        generation = next(self._generations)
        offer = JoinOffer(f"edge:{self._incarnation}:{generation}", generation)
        task = asyncio.create_task(self._serve(request.consumer, offer))
        self._served.add(task)
        task.add_done_callback(self._served.discard)
        return offer.to_json().encode()

    async def _serve(self, consumer: str, offer: JoinOffer) -> None:
        try:
            world = await offer.form(self._manager, 0, Address(self._host, self._port), _JOIN_S)
        except (WorldError, OSError) as error:
            logger.info("consumer=%s has not opened its edge: %s", consumer, error)
            return
        self._metrics.open["sent"].inc()
        logger.debug("edge=%s consumer=%s opened", world.name, consumer)
        try:
            await self._answer(world)
        except (WorldError, TimeoutError, ValueError, msgspec.MsgspecError) as ending:
            logger.debug("edge=%s consumer=%s ended: %s", world.name, consumer, ending)
        finally:
            self._metrics.open["sent"].dec()
            with contextlib.suppress(WorldError):
                await self._manager.close_world(world.name)

    async def _answer(self, world: World) -> NoReturn:
        """Answer fetches in their order until the edge ends.

        Raises WorldError; TimeoutError if the consumer does not read; ValueError and msgspec.MsgspecError for an invalid fetch.
        """
        allocate = self._manager.allocate if world.transport is Transport.SHARED_MEMORY else None
        while True:
            view = await world.recv_view(_check_size, _CONSUMER_RANK)
            fetch = _FETCH.decode(view.data.numpy().data)
            found = self.store.rows(fetch.refs, allocate, fetch.row_bytes)
            async with asyncio.timeout(_SEND_S):
                if found is None:
                    await world.start_send_message(b"", None, _CONSUMER_RANK)
                    continue
                await world.start_send_message(rows_head(found.dtype, found.shape), found, _CONSUMER_RANK)
            self._metrics.bytes["sent", world.transport].inc(found.nbytes)
            if fetch.take:
                self.store.take(fetch.refs)
            del found


def _check_size(_header: bytes, size_bytes: int) -> None:
    if size_bytes > _MAX_FETCH_BYTES:
        raise WireError(f"a fetch of {size_bytes} bytes; expected at most {_MAX_FETCH_BYTES}")
