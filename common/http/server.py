"""One HTTP port: its socket, uvicorn, its connection limits, and a TLS certificate that can be replaced while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import Literal, cast

import uvicorn
from starlette.types import ASGIApp

from multiworld_serving.common.http.connection_table import Connection, ConnectionLimits, ConnectionTable
from multiworld_serving.common.http.listener import BACKLOG
from multiworld_serving.common.http.protocol import BoundedHttpProtocol
from multiworld_serving.common.http.tls_listener import TlsListener

logger = logging.getLogger(__name__)

_CLOSE_S = 3
"""Enough if all requests already have their responses."""


class HttpServer(uvicorn.Server):
    """Uvicorn with one listening socket and without its signal handlers; the process handles signals itself.

    Args:
        connections: table of this port's connections, initially empty.
        sock: bound and listening.
        context: for TLS; None = plain HTTP.
        lifespan: "off" for an application without ASGI lifespan events.
    """

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        connections: ConnectionTable,
        *,
        context: ssl.SSLContext | None = None,
        lifespan: Literal["auto", "off"] = "auto",
    ) -> None:
        self.connections = connections
        super().__init__(_config(app, connections.limits, lifespan))
        self.listening = asyncio.Event()
        self.stopped = asyncio.Event()
        self._sock = sock
        self._context = context

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise RuntimeError("the application did not start; see the log")
        self.servers = [await self._listen()]
        self.started = True
        self.listening.set()

    def set_graceful_timeout(self, seconds: float) -> None:
        """Set how long running requests may take after shutdown begins. Needed if the server was not drained before."""
        self.config.timeout_graceful_shutdown = math.ceil(seconds)

    def reload_tls(self, context: ssl.SSLContext) -> None:
        """Use this context for new connections. Open connections keep theirs. Only for a port that already uses TLS."""
        self._context = context

    async def _listen(self) -> asyncio.Server:
        sock = self._sock.dup()  # asyncio closes the socket of a server that ends; this one stays open
        if self._context is None:
            return await asyncio.get_running_loop().create_server(self._protocol, sock=sock, backlog=BACKLOG)
        return cast("asyncio.Server", TlsListener(sock, self.connections, self._current_context, self._protocol))

    def _current_context(self) -> ssl.SSLContext:
        assert self._context is not None
        return self._context

    def _protocol(self, handshake: Connection | None = None) -> BoundedHttpProtocol:
        state = (self.config, self.server_state, self.lifespan.state)
        return BoundedHttpProtocol(*state, connections=self.connections, handshake=handshake)


@asynccontextmanager
async def serving(server: HttpServer) -> AsyncIterator[HttpServer]:
    """Serve while the block runs."""
    task = asyncio.create_task(server.serve(sockets=[server._sock]))
    task.add_done_callback(lambda _: server.stopped.set())
    sweeper = asyncio.create_task(_sweep(server.connections))
    try:
        yield server
    finally:
        server.should_exit = True
        await task
        sweeper.cancel()


async def _sweep(connections: ConnectionTable) -> None:
    loop, pause_s = asyncio.get_running_loop(), connections.limits.sweep_interval_s
    while True:
        began_s = loop.time()
        await asyncio.sleep(pause_s)
        if (late_s := loop.time() - began_s - pause_s) > pause_s:
            connections.extend_deadlines(late_s)
        connections.sweep(loop.time())


def _config(app: ASGIApp, limits: ConnectionLimits, lifespan: Literal["auto", "off"]) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan=lifespan,
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,  # the frontend writes its own: see `server.http.access_log`
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=math.ceil(limits.idle_timeout_s),
        timeout_graceful_shutdown=_CLOSE_S,
    )


def within_descriptor_limit(limits: ConnectionLimits) -> ConnectionLimits:
    """Limit the connections to half of this process's file descriptors; the rest is for workers and files."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or limits.max_connections <= most // 2:
        return limits
    logger.warning(
        "max_connections=%d reduced to %d, half of the file descriptor limit", limits.max_connections, most // 2
    )
    return ConnectionLimits(**{**vars(limits), "max_connections": most // 2})
