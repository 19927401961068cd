"""One HTTP port: its socket, uvicorn, the limit of its connections, and a TLS certificate that can be replaced while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import socket
import ssl
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from multiworld_serving.common.http.connection import HttpConnection, Idle
from multiworld_serving.common.http.listener import BACKLOG

KEEP_ALIVE_S = 75
"""A connection without a request is closed after this time. A proxy must close its idle connections earlier."""
_CLOSE_S = 3
"""Enough if all requests already have their responses."""
_POLL_S = 0.02
_LAST_REQUEST_POLLS = 50
"""When a server stops, it waits for one more request of each connection for a second."""


class HttpServer(uvicorn.Server):
    """Uvicorn with one listening socket and without its signal handlers; the process handles signals itself.

    Args:
        sock: bound and listening; closed when the server stops.
        max_connections: for a further one, the connection that is idle longest is closed. If none is idle, the new one gets 503.
        context: for TLS; None = plain HTTP.
        close_s: how long running requests may take after shutdown begins.

    Attributes:
        refuses: set when it accepts no more connections.
        stopped: set when all connections are closed.
    """

    def __init__(
        self,
        app: ASGIApp,
        sock: socket.socket,
        *,
        max_connections: int,
        keep_alive_s: int = KEEP_ALIVE_S,
        context: ssl.SSLContext | None = None,
        close_s: float = _CLOSE_S,
    ) -> None:
        config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.ERROR,  # a client can cause a warning with each request
            access_log=False,  # the frontend writes its own: see `server.frontend.http`
            server_header=False,
            proxy_headers=False,  # what proxies send is only read to refuse admin requests
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=math.ceil(close_s),
        )
        config.load()
        config.ssl = context
        super().__init__(config)
        self.stopped = asyncio.Event()
        self.refuses = asyncio.Event()
        self._sock = sock
        self._max_connections = max_connections
        self._idle = Idle()
        self._opening: set[asyncio.Task[None]] = set()
        self._newest_context = context
        if context is not None:
            context.sni_callback = self._use_newest_context

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self.server_state.connections)

    def reload_tls(self, context: ssl.SSLContext | None) -> None:
        """Use this context for new connections. Open connections keep theirs. A port with TLS gets one, and only such a port."""
        self._newest_context = context

    def _use_newest_context(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in each handshake, also without a server name."""
        assert self._newest_context is not None
        connection.context = self._newest_context

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections. uvicorn would not know of them before their TLS handshakes have ended."""
        await super().startup(sockets=[])
        asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def _accept(self) -> bool:
        """Accept one connection. Returns whether there was one."""
        loop = asyncio.get_running_loop()
        try:
            sock, _ = self._sock.accept()
        except OSError as error:
            if error.errno == errno.EINVAL:  # it does not listen any more
                loop.remove_reader(self._sock)
            elif error.errno in (errno.EMFILE, errno.ENFILE):
                self._idle.close_one()
            return False
        sock.setblocking(False)
        refused = self.connections >= self._max_connections and not self._idle.close_one()
        connection = HttpConnection(sock, self._idle, self.config, self.server_state)
        if refused:
            connection.limit_concurrency = 0  # its requests get 503
        opening = loop.create_task(self._open(connection, sock))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        return True

    async def _open(self, connection: HttpConnection, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: connection, sock, ssl=self.config.ssl)
        except OSError:  # the client went away, or its handshake was wrong or too slow
            connection.forget()
            sock.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and end the open ones with their next response: a client may have sent its request just now."""
        for _ in range(BACKLOG):  # the system has accepted these already, and would reset them
            if not self._accept():
                break
        asyncio.get_running_loop().remove_reader(self._sock)
        self._sock.close()
        self.refuses.set()
        self.server_state.default_headers.append((b"connection", b"close"))
        for _ in range(_LAST_REQUEST_POLLS):  # a pause of the whole machine counts as one
            if self.server_state.connections:
                await asyncio.sleep(_POLL_S)
        await super().shutdown(sockets)

    async def run_until_stopped(self) -> None:
        """Serve until `should_exit` is set, then set `stopped`."""
        try:
            await self.serve(sockets=[self._sock])
        finally:
            self.stopped.set()


@asynccontextmanager
async def serving(server: HttpServer) -> AsyncIterator[HttpServer]:
    """Serve while the block runs."""
    task = asyncio.create_task(server.run_until_stopped())
    try:
        yield server
    finally:
        server.should_exit = True
        await task
