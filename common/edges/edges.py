"""The data edges of one process: what it keeps for others, and how it fetches from them."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
from collections.abc import Callable, Sequence
from types import TracebackType

import torch
from torch import Tensor

from multiworld import WorldManager
from multiworld_serving.common.config import UserError
from multiworld_serving.common.config.addresses import Address, parse_address
from multiworld_serving.common.config.edges import EdgePortSettings
from multiworld_serving.common.edges.metrics import EdgeMetrics
from multiworld_serving.common.edges.pool import EdgePool, TensorGoneError
from multiworld_serving.common.edges.server import EdgeServer
from multiworld_serving.common.edges.store import TensorStore
from multiworld_serving.common.wire import EdgeState, RowRef

_POLL_S = 0.02
_MAX_KEPT_BYTES = 1 << 30
"""Of tensors that a process keeps for others to fetch. Above it, tensors go through a leader."""

logger = logging.getLogger(__name__)


class Edges:
    """Owns the store, the server and the pool of one process. Use as `async with`: it listens on entry.

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
        register: Callable[[int, int], Callable[[], None]] | None = None,
    ) -> None:
        self.holder = ""
        self.store = TensorStore(_MAX_KEPT_BYTES, metrics, settings.edge_min_bytes)
        self._settings = settings
        loopback = ipaddress.ip_address(host).is_loopback
        self._host = "0.0.0.0" if loopback and settings.advertise_edge is not None else host  # noqa: S104 - asked for
        self._incarnation = secrets.token_hex(8)
        secret, *_ = self._secrets = settings.edge_secrets
        self._manager = WorldManager(
            secret=secret,
            verify_collectives=False,
            **settings.heartbeats,
            bind_host=bind_host,
            on_shared_memory_missing=metrics.shared_memory_missing,
            register_shared_memory=register,
        )
        self._server = EdgeServer(self.store, self._manager, self._incarnation, metrics)
        self._pool = EdgePool(name, self._manager, secret, metrics, bind_host)

    async def __aenter__(self) -> Edges:
        """Listen. Raises UserError if the port is not available."""
        settings = self._settings
        try:
            self._server.listen(self._host, settings.edge_port)
        except OSError as error:
            await self._manager.aclose()
            raise UserError(
                f"--edge-port {settings.edge_port} on {self._host} cannot be used: {error}; choose another one, or --edges relay"
            ) from error
        self._manager.set_accepted_secrets(*self._secrets)
        address = Address(self._host, self._server.port)
        if settings.advertise_edge is not None:
            address = parse_address(settings.advertise_edge, default_port=self._server.port)
        self.holder = f"{address}/{self._incarnation}"
        logger.debug("edges listen address=%s", address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._pool.close()
        await self._server.close()
        await self._manager.aclose()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialized memory for a tensor to keep. Consumers on this host can read it in place if it is in shared memory, which it is
        unless it is small or no shared memory is left. May be called on any thread."""
        return self._manager.allocate(shape, dtype)

    def states(self) -> tuple[EdgeState, ...]:
        """See `EdgePool.states`."""
        return self._pool.states()

    async def wait_fetched(self, timeout_s: float) -> None:
        """Wait until no tensor is kept any more, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self.store):  # noqa: ASYNC110 - once, when the process ends
                    await asyncio.sleep(_POLL_S)

    async def fetch(
        self, holder: str, refs: Sequence[RowRef], dtype: torch.dtype, shape: tuple[int, ...], *, take: bool = False
    ) -> Tensor:
        """See `EdgePool.fetch`. Tensors of this process are read from its own store."""
        if holder != self.holder:
            return await self._pool.fetch(holder, refs, dtype, shape, take=take)
        found = self.store.rows(refs)
        if found is None or found.dtype != dtype or tuple(found.shape) != shape:
            raise TensorGoneError("this process does not have it any more")
        if take:
            self.store.take(refs)
        return found
