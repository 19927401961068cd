"""uvicorn's HTTP protocol with strict RFC 9112 checks. Requests before a rejected one are answered first.

Limits and timeouts of a port are in protocol.py.
"""

from __future__ import annotations

import http
import json
import re
import uuid
from asyncio import AbstractEventLoop
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, NoReturn

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

MALFORMED: Final = "malformed"
NOT_IMPLEMENTED: Final = "not_implemented"
VERSION_NOT_SUPPORTED: Final = "http_version_not_supported"

Headers = Sequence[tuple[bytes, bytes]]
"""Names are in lower case."""

_HOST = re.compile(rb"(\[[0-9A-Za-z:.%~_-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(:[0-9]*)?")
_VERSIONS = frozenset({"1.0", "1.1"})


class ErrorResponse(NamedTuple):
    """A response sent by the server in place of the application's."""

    status: int
    reason: str
    error: str

    def headers_and_body(self) -> tuple[dict[str, str], bytes]:
        """Headers and JSON body, in the format of all error responses."""
        request_id = uuid.uuid4().hex
        body = json.dumps({"error": self.error, "reason": self.reason, "request_id": request_id}).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "x-request-id": request_id}
        return headers | ({"retry-after": "1"} if self.status in {429, 503} else {}), body

    def to_bytes(self, *, with_body: bool) -> bytes:
        """The whole response with `Connection: close`. A response to HEAD has no body."""
        headers, body = self.headers_and_body()
        head = [f"HTTP/1.1 {self.status} {http.HTTPStatus(self.status).phrase}"]
        head += [f"{name}: {value}" for name, value in (headers | {"connection": "close"}).items()]
        return "\r\n".join([*head, "", ""]).encode() + (body if with_body else b"")


NO_REQUEST: Final = ErrorResponse(400, MALFORMED, "this is not an HTTP/1.1 request; send one that conforms to RFC 9112")


def header_error(method: bytes, version: str, headers: Headers) -> ErrorResponse | None:
    """The error for request headers that the parser accepts but RFC 9112 forbids; None if there is none.

    The parser itself rejects errors within one header: invalid characters, folded lines, an invalid Content-Length, or Content-Length
    together with Transfer-Encoding.
    """
    if version not in _VERSIONS:
        error = f"HTTP/{version} is not supported; send the request as HTTP/1.1"
        return ErrorResponse(505, VERSION_NOT_SUPPORTED, error)
    if method == b"CONNECT":
        return ErrorResponse(
            501, NOT_IMPLEMENTED, "this is not a proxy and CONNECT is not implemented; send GET or POST"
        )
    return _host_error(version, headers) or _transfer_encoding_error(version, headers)


def _host_error(version: str, headers: Headers) -> ErrorResponse | None:
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        return _malformed(f"the request has {len(hosts)} Host headers; send one")
    if not hosts and version == "1.1":
        return _malformed("the request has no Host header, which HTTP/1.1 requires; send one")
    if hosts and not _HOST.fullmatch(hosts[0]):
        return _malformed("the Host header is not a host with an optional port; send HOST or HOST:PORT")
    return None


def _transfer_encoding_error(version: str, headers: Headers) -> ErrorResponse | None:
    """RFC 9112, sections 6.1 and 6.3: the length of a body must be unambiguous."""
    given = [value for name, value in headers if name == b"transfer-encoding"]
    if not given:
        return None
    if version == "1.0":
        return _malformed("HTTP/1.0 has no Transfer-Encoding; send Content-Length, or HTTP/1.1")
    codings = [coding.strip().lower() for coding in b",".join(given).split(b",") if coding.strip()]
    if codings == [b"chunked"]:
        return None
    if codings.count(b"chunked") != 1 or codings[-1] != b"chunked":
        return _malformed("the last transfer coding must be chunked, once; send `Transfer-Encoding: chunked` alone")
    error = "transfer codings other than chunked are not implemented; send `Transfer-Encoding: chunked` alone"
    return ErrorResponse(501, NOT_IMPLEMENTED, error)


def _malformed(error: str) -> ErrorResponse:
    return ErrorResponse(400, MALFORMED, error)


class StrictHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._in_headers = self._in_body = False
        self._unfinished: list[RequestResponseCycle] = []
        """Requests whose responses are incomplete, oldest first. `cycle` is the last request that began."""
        self._rejection: ErrorResponse | None = None
        """The error for the last request. Nothing after it is read."""
        self._rejection_is_sent = True
        """False if the last request's response has started, so that the client would misread the error as part of it."""
        self._is_head_request = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_keepalive_if_required()  # else the keep-alive timer keeps a reset connection alive
        super().connection_lost(exc)
        self._abandon(*self._unfinished)  # uvicorn notifies only the last one

    def data_received(self, data: bytes) -> None:
        if self._rejection is not None or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._rejection is not None:
            self._reject(self._rejection)

    def _parse(self, data: bytes) -> None:
        """Parse `data`, up to the first rejected request.

        The parser stops at a request with an Upgrade header. A server may ignore Upgrade (RFC 9110, section 7.8): a new parser gets the
        same request without that header.
        """
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._headers_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                continue
            except httptools.HttpParserError:
                self._rejection = self._rejection or NO_REQUEST
            return

    def _headers_without_upgrade(self) -> bytes:
        first = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        headers = (b"%s: %s" % header for header in self.headers if header[0] != b"upgrade")
        return b"\r\n".join([first, *headers, b"", b""])

    # -- parser callbacks ----------------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._is_head_request = True, False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # ignore trailers: they must not change checked headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._is_head_request = self.parser.get_method() == b"HEAD"
        if (rejection := self._check_headers()) is not None:
            self._stop(rejection)
        if not self.parser.should_upgrade():
            super().on_headers_complete()
            self._unfinished.append(self.cycle)
            self._in_body = True

    def on_body(self, body: bytes) -> None:
        if self._in_body:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._in_body:
            self._in_body = False
            super().on_message_complete()

    def _check_headers(self) -> ErrorResponse | None:
        """The error for which this request is rejected before its body is read; None if there is none."""
        return header_error(self.parser.get_method(), self.parser.get_http_version(), self.headers)

    def _stop(self, rejection: ErrorResponse) -> NoReturn:
        """Stop parsing. Called from parser callbacks."""
        self._rejection = rejection
        raise ValueError(rejection.reason)

    # -- rejections ----------------------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self._unfinished = [cycle for cycle in self._unfinished if not cycle.response_complete]
        super().on_response_complete()
        if self._rejection is not None and not self._unfinished and not self.transport.is_closing():
            self._close_rejected(self._rejection)

    def _reject(self, rejection: ErrorResponse) -> None:
        """Reject the last request and close the connection. The requests before it are answered first."""
        self._rejection = rejection
        if self._in_body:  # the application has the request already
            self._rejection_is_sent = not self.cycle.response_started
            self._unfinished = [cycle for cycle in self._unfinished if cycle is not self.cycle]
            if self.pipeline and self.pipeline[0][0] is self.cycle:
                self.pipeline.popleft()
            self._abandon(self.cycle)
        if not self._unfinished:
            self._close_rejected(rejection)

    def _close_rejected(self, rejection: ErrorResponse) -> None:
        if self._rejection_is_sent:
            self.transport.write(rejection.to_bytes(with_body=not self._is_head_request))
        self.transport.close()

    def _abandon(self, *cycles: RequestResponseCycle) -> None:
        """Tell the application that the client is disconnected from these requests."""
        for cycle in cycles:
            cycle.disconnected = True
            cycle.message_event.set()
