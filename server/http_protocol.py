"""Uvicorn's HTTP protocol, bounded: what a client sends before its request is one, and how long it takes for it.

Uvicorn bounds neither the time for a request's head or body nor what is pipelined, and a new connection that says nothing stays for
ever. Everything here happens before there is a request that the application could refuse, so it cannot be middleware.
"""

from __future__ import annotations

import asyncio
import http
import json
import uuid
from typing import Any, Final

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.connections import FULL, HEAD_TOO_LARGE, MALFORMED, PIPELINED, Connections, Phase

_MAX_PIPELINED = 16
"""Requests of one connection that wait for the answer of the one before them."""

_REFUSALS: Final[dict[str, tuple[int, str]]] = {
    MALFORMED: (400, "this is not HTTP/1.1, or a request that cannot be; send one as RFC 9112 has it"),
    Phase.HEAD.value: (408, "the head of the request did not come in time; send it faster"),
    Phase.BODY.value: (408, "the body of the request did not come in time; send it faster"),
    FULL: (503, "too many connections wait for an answer; try again later"),
    HEAD_TOO_LARGE: (
        431,
        "the head of the request has more than {0.max_headers} headers or {0.max_header_bytes} bytes",
    ),
    PIPELINED: (429, f"more than {_MAX_PIPELINED} requests wait on this connection; wait for answers, or use several"),
}
"""Status, and a sentence with the limits filled in."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection.

    Args:
        connections: all of its port, of which this is one.
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
        connections: Connections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._all = connections
        self._limits = connections.limits
        self._in_head = self._in_body = False
        self._heads = 0
        """How many have begun."""
        self._head_bytes = self._unparsed_bytes = 0
        """Of the last head: what the parser has told of it, and what came in reads that began and ended within it."""
        self._unfinished: list[RequestResponseCycle] = []
        """Requests without their whole answer, the one that is answered first. `cycle` is the last one of them."""
        self._unsent_bytes = 0
        """Of an answer, when it was looked at last."""
        self._refusal = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._all.enter(self, self.loop.time()):
            self._refuse(FULL)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()  # else it keeps a connection that was reset until it is due
        super().connection_lost(exc)
        self._abandon()
        self._all.leave(self)

    def data_received(self, data: bytes) -> None:
        if self._refusal or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        head = self._heads if self._in_head else 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self.cycle is not None:
                self.cycle.keep_alive = False  # it is answered, and what follows is no HTTP
        except httptools.HttpParserError:
            self._refusal = self._refusal or MALFORMED
        if self._in_head and self._heads == head:
            self._unparsed_bytes += len(data)
            if self._unparsed_bytes > self._limits.max_header_bytes:
                self._refusal = HEAD_TOO_LARGE
        if self._refusal:
            self._refuse(self._refusal)
        else:
            self._advance(received=True)

    # -- what the parser finds -----------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes, self._unparsed_bytes = True, 0, 0
        self._heads += 1

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if len(self.headers) >= self._limits.max_headers:
            self._refusal = HEAD_TOO_LARGE
        if not self._refusal:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._refusal = PIPELINED
        if not self._refusal:
            self._in_body = True
            super().on_headers_complete()
            self._unfinished.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        if not self._refusal:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        if not self._refusal:
            super().on_message_complete()

    def _count(self, more_bytes: int) -> None:
        self._head_bytes += more_bytes
        if self._head_bytes > self._limits.max_header_bytes:
            self._refusal = HEAD_TOO_LARGE

    # -- what the connection waits for ---------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self._unfinished = [cycle for cycle in self._unfinished if not cycle.response_complete]
        super().on_response_complete()
        self._advance(received=False)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._advance(received=False)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._advance(received=False)

    def _advance(self, *, received: bool) -> None:
        phase = self._phase_now(received=received)
        renewed = phase is Phase.BODY and received
        if phase is not self.phase or renewed:
            self._unsent_bytes = self.transport.get_write_buffer_size()
            self._all.move(self, phase, self.loop.time())

    def _phase_now(self, *, received: bool) -> Phase:
        if self.transport.is_closing():
            return Phase.CLOSING
        if self.flow.write_paused:
            return Phase.STUCK
        if self.cycle is not None and not self.cycle.response_complete:
            waits_for_client = self.cycle.more_body and not self.flow.read_paused
            return Phase.BODY if waits_for_client else Phase.ANSWERING
        if self._in_body:
            return Phase.DRAINING
        nothing_yet = received and (self.cycle is None or self.phase in (Phase.IDLE, Phase.HEAD))  # empty lines, say
        return Phase.HEAD if self._in_head or nothing_yet else Phase.IDLE

    # -- how it ends ---------------------------------------------------------------------------------------------------------------

    def expire(self, reason: str) -> None:
        """See `server.connections.Connection`. Who has to make room, has sent nothing or takes nothing is not answered."""
        if reason in _REFUSALS:
            self._refuse(reason)
            return
        if reason in (Phase.STUCK.value, Phase.CLOSING.value) and self._takes():
            self._all.move(self, self.phase, self.loop.time())
            return
        if self.phase is not Phase.CLOSING:
            self._all.closed(reason)
        self._all.leave(self)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._refuse(MALFORMED)

    def _takes(self) -> bool:
        """Whether the client, slowly, has taken more of its answer since this was asked last."""
        before, self._unsent_bytes = self._unsent_bytes, self.transport.get_write_buffer_size()
        return 0 < self._unsent_bytes < before

    def _abandon(self) -> None:
        """Tell all that is being answered that nobody waits for it: Uvicorn tells the last one alone."""
        for cycle in self._unfinished:
            cycle.disconnected = True
            cycle.message_event.set()

    def _refuse(self, reason: str) -> None:
        """Answer and close; close alone where an answer is being written, into which another one must not fall."""
        self._refusal = reason
        self._all.closed(reason)
        self._all.move(self, Phase.CLOSING, self.loop.time())
        if not (self._unfinished and self._unfinished[0].response_started):
            self.transport.write(_answer(reason, _REFUSALS[reason][1].format(self._limits)))
        self._abandon()
        self.transport.close()


def _answer(reason: str, sentence: str) -> bytes:
    status = http.HTTPStatus(_REFUSALS[reason][0])
    request_id = uuid.uuid4().hex
    body = json.dumps({"error": sentence, "reason": reason, "request_id": request_id}).encode()
    head = [
        f"HTTP/1.1 {status} {status.phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-request-id: {request_id}",
        *(["retry-after: 1"] if status in {429, 503} else []),
        "connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body
