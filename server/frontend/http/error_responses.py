"""The only place that formats error responses. `common.service.errors` has the statuses.

{"error": "<what was wrong, what was expected, what to do>", "reason": "overloaded", "request_id": "…"}
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Scope

from multiworld_serving.common.service.errors import RequestRejected
from multiworld_serving.server.frontend.observability.request_records import RequestRecord

INTERNAL_ERROR = "the server failed on this request; search its log for the request id"
"""The error after an unexpected exception."""

_CLOSING = {"body_timeout"}
"""Errors after which the connection is closed: the client sends too slowly, and closing is the only way to stop it. After
`body_too_large` the connection stays open: closing it while the client sends resets it, and the client loses the response."""


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
    what = openai_error(status, error, reason) if record.protocol == "openai" else error
    body = {"error": what, "reason": reason, "request_id": record.request_id, **fields}
    return JSONResponse(body, status, headers)


def openai_error(status: int, error: str, reason: str) -> dict[str, str | None]:
    """The object that clients of OpenAI's API expect as `error`."""
    return {"message": error, "type": reason, "param": None, "code": str(status)}


def routing_response(
    error: HTTPException, scope: Scope, record: RequestRecord, other_port: OtherPort | None
) -> JSONResponse:
    """The response to a request for a path or with a method that has no route.

    Args:
        other_port: the port with the paths that this one does not have.
    """
    path = scope["path"]
    where = f"{scope['method']} {path[:256]}"
    if error.headers is not None and "Allow" in error.headers:
        allowed = sorted(error.headers["Allow"].split(", "))
        says = f"{where} is not allowed here; use {' or '.join(allowed)}"
        return error_response(405, says, "method_not_allowed", record, {"Allow": ", ".join(allowed)})
    if other_port is not None and other_port.serves(path):
        says = f"{where} does not exist here; it is on {other_port.name}, port {other_port.port}"
        return error_response(404, says, "not_found", record, other_port=other_port.port)
    return error_response(404, f"{where} does not exist; GET / lists the endpoints", "not_found", record)
