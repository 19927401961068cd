"""One connection of an HTTP port: uvicorn's protocol with limits for clients that send too much, read too little, or stay too long."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import OrderedDict
from collections.abc import Sized
from typing import Any, cast

from uvicorn import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

MAX_HEAD_BYTES = 1 << 16
"""Of the request line and the headers of a request, and of the bytes between two parts of a body: chunk sizes and trailers."""
MAX_HEADERS = 1024
"""Headers of a request that has not arrived completely. One takes up to 30 times as much memory as bytes were sent."""
MAX_PIPELINED = 64
"""Requests that have arrived on a connection while an earlier one has no response yet."""
_LINGER_S = 1.0
"""Time for which a client can go on sending after its request was refused. What it sends is dropped."""
_CLOSING_S = 0.1
"""Maximum time to send what a client has not received yet when its connection is closed for another one."""
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


class _Flow(FlowControl):
    """Reads nothing from a connection while requests wait in its pipeline. uvicorn would read on after each response."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if not self._pipeline:
            super().resume_reading()


class Idle:
    """The connections of a port that can be closed for a new one: no request of theirs is computed."""

    def __init__(self) -> None:
        self._unused: OrderedDict[HttpConnection, None] = OrderedDict()
        """No request has arrived on them. In the order in which they were opened."""
        self._used: OrderedDict[HttpConnection, None] = OrderedDict()
        """In the order of their last responses."""

    def update(self, connection: HttpConnection) -> None:
        """The connection was opened or closed, or a request of it has begun or ended."""
        self._unused.pop(connection, None)
        self._used.pop(connection, None)
        if connection.is_idle:
            (self._unused if connection.cycle is None else self._used)[connection] = None

    def close_one(self) -> bool:
        """Close the connection that is idle longest. Those that have been used come last. Returns whether there was one.

        Connections that get 503 are closed too. They do not count, because they were above the limit.
        """
        for connections in (self._unused, self._used):
            while connections:
                connection, _ = connections.popitem(last=False)
                connection.close_for_another()
                if connection.limit_concurrency is None:
                    return True
        return False


class HttpConnection(HttpToolsProtocol):
    """A connection from the time at which it is accepted. With TLS, `connection_made` follows after the handshake."""

    def __init__(self, sock: socket.socket, idle: Idle, config: Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self._sock = sock
        self._idle = idle
        self._is_lost = False
        self._refusal = b""
        """The last response. Nothing that arrives after it is parsed."""
        self._head_bytes = 0
        """Received since the last head or part of a body that was complete."""
        self.connections.add(self)
        idle.update(self)

    @property
    def is_idle(self) -> bool:
        """Whether the connection is open, and waits for its client: to send a request, or to read a response."""
        return not self._is_lost and (self.cycle is None or self.cycle.response_complete or self.flow.write_paused)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(cast("asyncio.Transport", JoiningTransport(transport)))
        self.flow = _Flow(transport, self.pipeline)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.forget()

    def forget(self) -> None:
        """The connection does not exist any more."""
        self._is_lost = True
        self.connections.discard(self)
        self._idle.update(self)

    def close_for_another(self) -> None:
        """Close the connection immediately if its client does not read, and else when what was written is sent."""
        if self.transport is None or self.transport.get_write_buffer_size():
            self._disconnect()
        else:
            self.transport.close()
            self.loop.call_later(_CLOSING_S, self._disconnect)  # with TLS, it would wait for the client

    def _disconnect(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            self._sock.shutdown(socket.SHUT_RDWR)

    def shutdown(self) -> None:
        """Close the connection, or let it end with its next response."""
        if self.transport is None:
            self._disconnect()
        else:
            super().shutdown()

    # -- limits of what a client sends -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse `data` up to the limit of a head. A larger head gets 431."""
        while data and not self._refusal and not self.transport.is_closing():
            room = MAX_HEAD_BYTES - self._head_bytes
            part, data = data[:room], data[room:]
            self._head_bytes += len(part)
            super().data_received(part)
            if self._head_bytes == MAX_HEAD_BYTES or (self._head_bytes and len(self.headers or ()) > MAX_HEADERS):
                limits = f"send at most {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers"
                self._refuse("431 Request Header Fields Too Large", f"the head of the request is too large; {limits}")

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this when the parser fails."""
        if len(self.pipeline) == MAX_PIPELINED:
            error = (
                f"more than {MAX_PIPELINED} requests wait on this connection; read the responses before sending more"
            )
            self._refuse("429 Too Many Requests", error)
        else:
            self._refuse("400 Bad Request", msg)

    def _refuse(self, status: str, error: str) -> None:
        """End the connection with this response to the request that arrives, after the responses to those before it."""
        if self._refusal:
            return
        self._refusal = (
            f"HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: {len(error)}\r\n"
            f"connection: close\r\n\r\n{error}"
        ).encode("ascii")
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._end()
        elif cycle.more_body and self.pipeline:
            self.pipeline.popleft()  # it is the request that arrives
        elif cycle.more_body:
            if cycle.response_started:
                self.transport.close()
            else:
                self._end()

    def _end(self) -> None:
        """Closing while the client sends would reset the connection, and the client would lose the response."""
        self.transport.write(self._refusal)
        self.loop.call_later(_LINGER_S, self.transport.close)

    def on_message_begin(self) -> None:
        if len(self.pipeline) == MAX_PIPELINED:
            raise OverflowError  # the parser fails
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = 0
        super().on_headers_complete()
        self._idle.update(self)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._refusal and not self.pipeline:
            self._end()
        super().on_response_complete()
        self._idle.update(self)

    # -- clients that do not read ----------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._idle.update(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._idle.update(self)
