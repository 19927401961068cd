"""Calls the inference routes without FastAPI when a request has no parameters to validate."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from multiworld_serving.server.errors import RequestRejected
from multiworld_serving.server.http.errors import rejection_response
from multiworld_serving.server.observability.request_record import RequestRecord

_TIMEOUT_HEADER = b"x-request-timeout-s"

DirectHandler = Callable[[Request], Awaitable[Response]]
"""Answers a request whose parameters have their defaults."""


class DirectRoutes:
    """ASGI middleware between the authorization and FastAPI, whose routing and validation take a quarter of the frontend's CPU time.

    FastAPI handles every other request, and documents the same routes: a request with a query or a timeout gets its
    parameters validated there.

    Args:
        handlers: by path; for POST.
    """

    def __init__(self, app: ASGIApp, *, handlers: Mapping[str, DirectHandler]) -> None:
        self._app = app
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get(scope["path"]) if scope["type"] == "http" and _has_defaults(scope) else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await handler(Request(scope, receive, send))
        except RequestRejected as rejection:
            response = rejection_response(rejection, RequestRecord.of(scope))
        await response(scope, receive, send)


def _has_defaults(scope: Scope) -> bool:
    """Whether this is a POST request without a parameter in its query or headers."""
    return (
        scope["method"] == "POST"
        and not scope["query_string"]
        and not any(name == _TIMEOUT_HEADER for name, _ in scope["headers"])
    )
