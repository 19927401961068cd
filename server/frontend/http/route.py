"""Routes whose endpoint takes a request and returns a response, and the parameters that they share."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from multiworld_serving.common.service.errors import InvalidParameterError

TIMEOUT_HEADER = "X-Request-Timeout-S"
_TIMEOUT_HEADER = TIMEOUT_HEADER.lower().encode("ascii")
_MAX_SHOWN_CHARS = 64

Endpoint = Callable[[Request], Awaitable[Response]]


class _Responding:
    """An endpoint as an ASGI application. Starlette's wrapper would also handle exceptions, as `Application` does for all routes."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._endpoint(Request(scope, receive))
        await response(scope, receive, send)


def route(path: str, endpoint: Endpoint, method: str = "GET") -> Route:
    """A route with this endpoint."""
    return Route(path, _Responding(endpoint), methods=[method])


def header(request: Request, name: bytes) -> str | None:
    """The first header with this name, which is in lower case. `Request.headers` takes five times as long for a few headers."""
    for each, value in request.scope["headers"]:
        if each == name:
            return str(value, "latin-1")
    return None


def query_parameters(request: Request, known: Sequence[str] = ()) -> dict[str, str]:
    """Return the query parameters. Raises InvalidParameterError for an unknown name, so that a misspelled parameter is not ignored."""
    if not (query := request.scope["query_string"]):
        return {}
    found = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    for name in found:
        if name not in known:
            expected = " or ".join(known) or "none"
            raise InvalidParameterError(f"unknown query parameter {name[:_MAX_SHOWN_CHARS]!r}: expected {expected}")
    return found


def client_timeout_s(request: Request) -> float | None:
    """The timeout that the client sends, in seconds since the request's arrival. Raises InvalidParameterError."""
    if (given := header(request, _TIMEOUT_HEADER)) is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidParameterError(
            f"header {TIMEOUT_HEADER}: expected seconds, a finite number greater than 0, got {given[:_MAX_SHOWN_CHARS]!r}"
        )
    return seconds
