"""One HTTP port: its socket, uvicorn, the limit of its connections, and a TLS certificate that can be replaced while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from multiworld_serving.common.http.listener import BACKLOG

KEEP_ALIVE_S = 75
"""A connection without a request is closed after this time. A proxy must close its idle connections earlier."""
_CLOSE_S = 3
"""Enough if all requests already have their responses."""
_POLL_S = 0.02
_LAST_REQUEST_POLLS = 50
"""When a server stops, it waits for one more request of each connection for a second."""
_MAX_JOINED_BYTES = 1 << 16


class JoiningTransport:
    """A connection that sends the head of a response together with its body.

    uvicorn writes the two separately, and uvloop would send each with a system call and a packet of its own. Nothing is written to a
    connection that closes: uvloop would raise.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send what is held and `data`. If nothing is held, `data` waits for the next write or the end of this turn of the event loop."""
        if self._held or len(data) > _MAX_JOINED_BYTES:
            self._send(data)
        elif data:
            self._held = data
            asyncio.get_running_loop().call_soon(self._send)

    def close(self) -> None:
        """Send what is held, and close."""
        self._send()
        self._transport.close()

    def _send(self, data: bytes = b"") -> None:
        joined, self._held = self._held + data, b""
        if joined and not self._transport.is_closing():
            self._transport.write(joined)


class _JoiningProtocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(cast("asyncio.Transport", JoiningTransport(transport)))


class HttpServer(uvicorn.Server):
    """Uvicorn with one listening socket and without its signal handlers; the process handles signals itself.

    Args:
        sock: bound and listening; closed when the server stops.
        max_connections: further requests get 503 while this many connections are open.
        context: for TLS; None = plain HTTP.
        close_s: how long running requests may take after shutdown begins.
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
            http=_JoiningProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.ERROR,  # a client can cause a warning with each request
            access_log=False,  # the frontend writes its own: see `server.http.access_log`
            server_header=False,
            backlog=BACKLOG,
            limit_concurrency=max_connections + 1,  # uvicorn refuses at the limit, not above it
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=math.ceil(close_s),
        )
        config.load()
        config.ssl = context
        super().__init__(config)
        self.stopped = asyncio.Event()
        self._sock = sock
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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and end the open ones with their next response: a client may have sent its request just now."""
        for server in self.servers:
            server.close()
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
