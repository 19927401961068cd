"""Accepts TLS connections and adds each to the connection table before its handshake.

asyncio's server reports a connection only after its handshake: until then it could neither be counted nor closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from multiworld_serving.common.http.connection_table import FULL, Connection, ConnectionTable, Phase

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
"""Pause after an error of accept(), such as no free file descriptor."""
_HANDSHAKE_GRACE_S = 5.0
"""The connection table ends a slow handshake; asyncio's own timeout is this much longer."""


class TlsListener:
    """Implements the part of `asyncio.Server` that uvicorn's shutdown uses.

    Args:
        sock: bound and listening; closed by `close`.
        context: returns the TLS context of the next handshake.
        protocol: creates the protocol of one connection; it replaces the handshake's table entry in `connection_made`.
    """

    def __init__(
        self,
        sock: socket.socket,
        connections: ConnectionTable,
        context: Callable[[], ssl.SSLContext],
        protocol: Callable[[Connection], asyncio.BaseProtocol],
    ) -> None:
        self._sock = sock
        self._connections = connections
        self._context = context
        self._protocol = protocol
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Stop accepting connections and cancel running handshakes."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until `close` has finished."""
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        with self._sock:
            while True:
                try:
                    sock, _ = await loop.sock_accept(self._sock)
                except ConnectionError:
                    continue  # reset before it was accepted
                except OSError as error:
                    logger.warning("cannot accept a connection: %s; trying again in %g s", error, _RETRY_S)
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._begin(sock, loop.time())
                await asyncio.sleep(0)  # let other tasks run even if the backlog is full

    def _begin(self, sock: socket.socket, now_s: float) -> None:
        handshake = _Handshake(self._connections)
        task = handshake.task = asyncio.create_task(self._handshake(handshake, sock))
        self._handshakes.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._handshakes.discard(task)
            if task.cancelled():  # possibly before it started
                sock.close()

        task.add_done_callback(ended)
        if not self._connections.enter(handshake, now_s, Phase.HANDSHAKE):
            handshake.expire(FULL)  # a response would need a finished handshake

    async def _handshake(self, handshake: _Handshake, sock: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._protocol(handshake),
                sock,
                ssl=self._context(),
                ssl_handshake_timeout=self._connections.limits.header_timeout_s + _HANDSHAKE_GRACE_S,
                ssl_shutdown_timeout=self._connections.limits.stall_timeout_s,  # unsent data is then lost
            )
        except OSError as error:  # not TLS, no valid client certificate, or disconnected
            logger.debug("TLS handshake failed: %s", error)
        finally:
            self._connections.leave(handshake)


class _Handshake:
    """A running handshake as an entry of the connection table."""

    phase = Phase.HANDSHAKE
    since_s = 0.0
    task: asyncio.Task[None]

    def __init__(self, connections: ConnectionTable) -> None:
        self._connections = connections

    def expire(self, reason: str) -> None:
        """See `Connection.expire`."""
        self._connections.on_closed(reason)
        self._connections.leave(self)
        self.task.cancel()
