"""The only place that formats error responses. `server.errors` has the statuses.

{"error": "<what was wrong, what was expected, what to do>", "reason": "overloaded", "request_id": "…"}
"""

from __future__ import annotations

import http
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from multiworld_serving.server.errors import InvalidParameterError, RequestRejected
from multiworld_serving.server.observability.requests import RequestRecord

INTERNAL_ERROR = "the server failed on this request; search its log for the request id"
"""The error after an unexpected exception."""

_CLOSING = {"body_timeout"}
"""Errors after which the connection is closed: the client sends too slowly, and closing is the only way to stop it. After
`body_too_large` the connection stays open: closing it while the client sends resets it, and the client loses the response."""

DESCRIPTIONS = {
    400: "The request is invalid for this model: its JSON, or its binary data.",
    401: "A key is required; the request has none, or an unknown one.",
    403: "The key does not permit this.",
    404: "The model or this version does not exist, or has another path.",
    408: "The body was not received in time.",
    413: "The body or the image is larger than the limit.",
    415: "The content type or content encoding is not supported.",
    422: "The parameters, the form or the image are invalid.",
    429: "Overloaded: try again after the seconds in Retry-After.",
    500: "The model or the server failed on this request.",
    503: "A stage has no replica, or the server is starting or stopping: try again after the seconds in Retry-After.",
    504: "The deadline passed before the response was ready.",
}


@dataclass(frozen=True)
class OtherPort:
    """The other one of the two ports of a frontend: the HTTP API or the admin port.

    Attributes:
        name: for messages.
        serves: whether a path belongs to it.
    """

    name: str
    port: int
    serves: Callable[[str], bool]


class ErrorBody(BaseModel):
    """Body of every error response."""

    error: str = Field(description="What was wrong, what was expected, what to do.")
    reason: str = Field(description="Machine-readable reason, one word.")
    request_id: str = Field(description="Id of the request, as in X-Request-Id and in the server's log.")


def error_documentation(statuses: Sequence[int]) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI description of these error responses."""
    documentation: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        documentation[status] = {"model": ErrorBody, "description": DESCRIPTIONS[status]}
        if status in (429, 503):
            documentation[status]["headers"] = {
                "Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
            }
    return documentation


def rejection_response(rejection: RequestRejected, record: RequestRecord, **fields: object) -> JSONResponse:
    """The response to a rejected request; its body also contains `fields`."""
    headers = {}
    if rejection.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(rejection.retry_after_s)))
    if rejection.reason in _CLOSING:
        headers["Connection"] = "close"
    return error_response(rejection.status, rejection.detail, rejection.reason, record, headers, **fields)


def error_response(
    status: int,
    error: str,
    reason: str,
    record: RequestRecord,
    headers: dict[str, str] | None = None,
    **fields: object,
) -> JSONResponse:
    """An error response in the common format. Also stores the reason in the record."""
    record.reason = reason
    body = {"error": error, "reason": reason, "request_id": record.request_id, **fields}
    return JSONResponse(body, status, headers)


def install_error_handlers(app: Starlette, other_port: OtherPort | None = None) -> None:
    """Give all errors of this application, including the framework's, the common format.

    Args:
        other_port: the port with the paths that this one does not have.
    """
    app.state.other_port = other_port
    app.add_exception_handler(RequestRejected, _on_rejection)
    app.add_exception_handler(RequestValidationError, _on_invalid_parameters)
    app.add_exception_handler(HTTPException, _on_http_exception)


async def _on_rejection(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestRejected)
    return rejection_response(error, RequestRecord.of(request.scope))


async def _on_invalid_parameters(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = "; ".join(
        f"{' '.join(str(part) for part in problem['loc'][:2])}: {problem['msg']}, got {str(problem['input'])[:64]!r}"
        for problem in error.errors()
        if problem["type"] != "none_required"  # of an optional parameter; another problem says what is expected
    )
    return rejection_response(InvalidParameterError(found), RequestRecord.of(request.scope))


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = http.HTTPStatus(error.status_code)
    where = f"{request.method} {request.url.path[:256]}"
    other: OtherPort | None = request.app.state.other_port
    fields: dict[str, object] = {}
    hint = "GET / lists the endpoints"
    if status == http.HTTPStatus.NOT_FOUND and other is not None and other.serves(request.url.path):
        hint, fields = f"it is on {other.name}, port {other.port}", {"other_port": other.port}
    detail = {
        404: f"{where} does not exist; {hint}" if not fields else f"{where} does not exist here; {hint}",
        405: f"{where} is not allowed here; see the Allow header and GET /openapi.json",
    }.get(status, str(error.detail))
    reason = status.phrase.lower().replace(" ", "_").replace("-", "_")
    headers = dict(error.headers or {})
    if "Allow" in headers:  # FastAPI omits HEAD, which is supported wherever GET is
        allowed = {*headers["Allow"].split(", ")}
        headers["Allow"] = ", ".join(sorted(allowed | ({"HEAD"} if "GET" in allowed else set())))
    return error_response(status, detail, reason, RequestRecord.of(request.scope), headers, **fields)
