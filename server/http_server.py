"""One HTTP port: its socket, uvicorn on it, its limits, and a certificate that can be exchanged while it serves."""

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
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from config import UserError
from server.connections import ConnectionLimits, Connections
from server.http_protocol import BoundedHttpProtocol

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_CLOSE_S = 3
"""Long enough where all requests have their answers already."""


class HttpServer(uvicorn.Server):
    """Uvicorn without its signal handlers, for this process has one way to stop; and with one listening socket of its own.

    Args:
        connections: of this port, at first none.
        sock: bound and listening.
        context: for TLS; None speaks plain HTTP.
    """

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        connections: Connections,
        *,
        context: ssl.SSLContext | None = None,
        access_log: bool = False,
    ) -> None:
        self.connections = connections
        super().__init__(_config(app, connections.limits, access_log=access_log))
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
            raise RuntimeError("the application did not start; its log says why")
        self.servers = [await self._listen(self._context)]
        self.started = True
        self.listening.set()

    def answer_within(self, seconds: float) -> None:
        """When it is told to stop, let requests that have begun take so long: it has not been drained."""
        self.config.timeout_graceful_shutdown = math.ceil(seconds)

    async def exchange(self, context: ssl.SSLContext) -> None:
        """Greet new connections with this context. Those that are there go on as they are. To be used while it listens."""
        old, self.servers = self.servers, [await self._listen(context)]
        for server in old:
            server.close()

    async def _listen(self, context: ssl.SSLContext | None) -> asyncio.Server:
        timeouts: dict[str, Any] = {}
        if context is not None:
            timeouts["ssl_handshake_timeout"] = self.connections.limits.header_timeout_s
            timeouts["ssl_shutdown_timeout"] = self.connections.limits.stall_timeout_s  # what is unsent then is lost
        state = (self.config, self.server_state, self.lifespan.state)
        factory = partial(BoundedHttpProtocol, *state, connections=self.connections)
        loop = asyncio.get_running_loop()
        sock = self._sock.dup()  # a server closes its socket when it ends; the port stays ours
        return await loop.create_server(factory, sock=sock, ssl=context, backlog=_BACKLOG, **timeouts)


@asynccontextmanager
async def serving(server: HttpServer) -> AsyncIterator[HttpServer]:
    """Serve while the block lasts."""
    task = asyncio.create_task(server.serve(sockets=[server._sock]))
    task.add_done_callback(lambda _: server.stopped.set())
    sweeper = asyncio.create_task(_sweep(server.connections))
    try:
        yield server
    finally:
        server.should_exit = True
        await task
        sweeper.cancel()


async def _sweep(connections: Connections) -> None:
    loop, pause_s = asyncio.get_running_loop(), connections.limits.sweep_s
    while True:
        began_s = loop.time()
        await asyncio.sleep(pause_s)
        if (late_s := loop.time() - began_s - pause_s) > pause_s:
            connections.forgive(late_s)
        connections.sweep(loop.time())


def _config(app: ASGIApp, limits: ConnectionLimits, *, access_log: bool) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="auto",
        log_config=None,
        log_level=logging.WARNING if not access_log else None,
        access_log=access_log,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=math.ceil(limits.idle_timeout_s),
        timeout_graceful_shutdown=_CLOSE_S,
    )


def affordable(limits: ConnectionLimits) -> ConnectionLimits:
    """With no more connections than half of the descriptors that this process may have: the rest is for workers and files."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or limits.max_connections <= most // 2:
        return limits
    logger.warning(
        "max_connections=%d is cut to %d, half of the descriptors there are", limits.max_connections, most // 2
    )
    return ConnectionLimits(**{**vars(limits), "max_connections": most // 2})


def bind(host: str, port: int, option: str) -> socket.socket:
    """A listening socket. Raises UserError, which names the option of the port, when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}; stop what listens there, or choose another "
            f"{option} (0 takes any free one) or --host"
        ) from error
    sock.setblocking(False)
    return sock
