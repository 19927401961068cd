"""Uvicorn's HTTP protocol with limits on the size and duration of requests that are still being received.

Uvicorn limits neither the time for a request's head or body nor the number of pipelined requests, and a new connection that
sends nothing stays open forever. All this happens before the application is called, so middleware cannot do it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.server import ServerState

from multiworld_serving.common.http.connection_table import (
    FULL,
    HEAD_TOO_LARGE,
    PIPELINED,
    Connection,
    ConnectionTable,
    Phase,
)
from multiworld_serving.common.http.strict import ErrorResponse, StrictHttpProtocol

_MAX_PIPELINED = 16
"""Maximum number of requests that wait on one connection behind the current one."""

_REFUSALS: Final = {
    rejection.reason: rejection
    for rejection in (
        ErrorResponse(408, Phase.HEAD.value, "the head of the request was not received in time; send it faster"),
        ErrorResponse(408, Phase.BODY.value, "the body of the request was not received in time; send it faster"),
        ErrorResponse(503, FULL, "too many connections wait for a response; try again later"),
        ErrorResponse(
            429,
            PIPELINED,
            f"more than {_MAX_PIPELINED} requests wait on this connection; wait for responses, or open more connections",
        ),
    )
}


class BoundedHttpProtocol(StrictHttpProtocol):
    """One connection.

    Args:
        connections: table of all connections of the port.
        handshake: entry that represented this connection during its TLS handshake.
    """

    phase = Phase.IDLE
    since_s = 0.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: ConnectionTable,
        handshake: Connection | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._table = connections
        self._handshake = handshake
        self._limits = connections.limits
        self._steps = 0
        """Number of heads begun and parts of bodies received."""
        self._head_bytes = self._unparsed_bytes = 0
        """Bytes of the current head seen by the parser, and bytes received since the last step."""
        self._unsent_bytes = 0
        """Bytes of the response in the write buffer when last checked."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._handshake is not None:
            self._table.leave(self._handshake)
        if not self._table.enter(self, self.loop.time()):
            self._reject(_REFUSALS[FULL])

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._table.leave(self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_phase(received=True)

    def _parse(self, data: bytes) -> None:
        steps = self._steps
        super()._parse(data)
        # Inside a head, or between or after the chunks of a body, the parser buffers or drops the data.
        if self._steps == steps:
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > self._limits.max_header_bytes:
                self._rejection = self._rejection or self._too_large()

    # -- callbacks of the parser ---------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._step()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if len(self.headers) >= self._limits.max_headers:
            self._stop(self._too_large())
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._step()

    def _check_headers(self) -> ErrorResponse | None:
        full = len(self.pipeline) >= _MAX_PIPELINED
        return super()._check_headers() or (_REFUSALS[PIPELINED] if full else None)

    def _step(self) -> None:
        self._steps += 1
        self._unparsed_bytes = 0

    def _count(self, more_bytes: int) -> None:
        self._head_bytes += more_bytes
        if self._head_bytes > self._limits.max_header_bytes:
            self._stop(self._too_large())

    def _too_large(self) -> ErrorResponse:
        most = f"{self._limits.max_headers} headers or {self._limits.max_header_bytes} bytes"
        return ErrorResponse(431, HEAD_TOO_LARGE, f"the head of the request has more than {most}; send a smaller one")

    # -- phase of the connection ---------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_phase(received=False)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._update_phase(received=False)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._update_phase(received=False)

    def _update_phase(self, *, received: bool) -> None:
        phase = self._current_phase(received=received)
        renewed = phase is Phase.BODY and received
        if phase is not self.phase or renewed:
            self._unsent_bytes = self.transport.get_write_buffer_size()
            self._table.move(self, phase, self.loop.time())

    def _current_phase(self, *, received: bool) -> Phase:
        if self.transport.is_closing():
            return Phase.CLOSING
        if self.flow.write_paused:
            return Phase.WRITE_BLOCKED
        if self._unfinished:
            # With several pipelined requests, the client waits for the first response.
            waits_for_client = self._unfinished[0].more_body and not self.flow.read_paused
            return Phase.BODY if waits_for_client else Phase.PROCESSING
        if self._in_body:
            return Phase.DRAINING
        nothing_yet = received and (self.cycle is None or self.phase in (Phase.IDLE, Phase.HEAD))  # such as empty lines
        return Phase.HEAD if self._in_headers or nothing_yet else Phase.IDLE

    # -- closing -------------------------------------------------------------------------------------------------------------------

    def expire(self, reason: str) -> None:
        """See `Connection.expire`. Evicted, idle and write-blocked connections get no response."""
        if reason in _REFUSALS:
            self._reject(_REFUSALS[reason])
            return
        if reason in (Phase.WRITE_BLOCKED.value, Phase.CLOSING.value) and self._made_progress():
            self._table.move(self, self.phase, self.loop.time())
            return
        if self.phase is not Phase.CLOSING:
            self._table.on_closed(reason)
        self._table.leave(self)
        self.transport.abort()

    def _made_progress(self) -> bool:
        """Whether the client has read more of its response since the last call."""
        before, self._unsent_bytes = self._unsent_bytes, self.transport.get_write_buffer_size()
        return 0 < self._unsent_bytes < before

    def _close_rejected(self, rejection: ErrorResponse) -> None:
        self._table.on_closed(rejection.reason)
        self._table.move(self, Phase.CLOSING, self.loop.time())
        super()._close_rejected(rejection)
