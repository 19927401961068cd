"""The one place where a reason becomes an HTTP status, and where every error gets its shape.

{"error": "<what was wrong, what was expected, what to do>", "reason": "overloaded", "request_id": "…"}
"""

from __future__ import annotations

import http
import math
from collections.abc import Sequence
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from server.errors import InvalidParameterError, RequestRefused
from server.request_record import RequestRecord

CLIENT_GONE = 499
"""Nobody reads it; it is nginx's number for a client that went away, and a label in the metrics."""

STATUS_OF_REASON: Final[dict[str, int]] = {
    "invalid_request": 422,
    "invalid_parameter": 422,
    "invalid_body": 422,
    "invalid_inference_request": 400,
    "unknown_model": 404,
    "unauthenticated": 401,
    "forbidden": 403,
    "invalid_image": 422,
    "image_too_large": 413,
    "body_too_large": 413,
    "body_timeout": 408,
    "unsupported_media_type": 415,
    "overloaded": 429,
    "cancelled": CLIENT_GONE,
    "poison": 500,
    "stage_error": 500,
    "internal": 500,
    "refused": 503,
    "no_replica": 503,
    "not_ready": 503,
    "draining": 503,
    "deadline": 504,
}

_DEFAULT_RETRY_AFTER_S = {"overloaded": 1.0, "no_replica": 1.0, "not_ready": 1.0, "draining": 1.0}
"""For the refusals that pass by themselves, when whoever refused does not know better."""

_CLOSING = {"body_timeout"}
"""Refused while the client still sends, for sending too slowly: closing is the only way to make it stop. After a body
that is too large the connection stays: closing it while bytes are under way resets it, and clients lose the answer."""

DESCRIPTIONS = {
    400: "The request is not one for this model: what its JSON says, or the data behind it.",
    401: "A key is needed, and there was none, or one that nobody was given.",
    403: "The key may not do this.",
    404: "There is no such model, or not in that version.",
    408: "The body did not come in time.",
    413: "The body or the image is larger than the limit.",
    415: "The content type or encoding is not served.",
    422: "The parameters, the form or the image cannot be used.",
    429: "Overloaded: try again after the seconds in Retry-After.",
    500: "The model, or the server, failed on this request.",
    503: "A stage has no replica, or the server is starting or stopping: try again after the seconds in Retry-After.",
    504: "The request's time was over before its answer was there.",
}


class ErrorBody(BaseModel):
    """What every error looks like."""

    error: str = Field(description="What was wrong, what was expected, what to do.")
    reason: str = Field(description="The same in one word for machines.")
    request_id: str = Field(description="The id that also stands in X-Request-Id and in the server's log.")


def error_documentation(statuses: Sequence[int]) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI description of these error answers."""
    documentation: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        documentation[status] = {"model": ErrorBody, "description": DESCRIPTIONS[status]}
        if status in (429, 503):
            documentation[status]["headers"] = {
                "Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
            }
    return documentation


def refusal_response(refusal: RequestRefused, record: RequestRecord, **fields: object) -> JSONResponse:
    """The answer to a request that was refused; `fields` stand in its body too."""
    headers = {}
    retry_after_s = refusal.retry_after_s
    if retry_after_s is None:
        retry_after_s = _DEFAULT_RETRY_AFTER_S.get(refusal.reason)
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    if refusal.reason in _CLOSING:
        headers["Connection"] = "close"
    return error_response(STATUS_OF_REASON[refusal.reason], refusal.detail, refusal.reason, record, headers, **fields)


def internal_error_response(record: RequestRecord) -> JSONResponse:
    """The answer when a bug of ours ended the request."""
    detail = "the server failed on this request; the request id finds the traceback in its log"
    return error_response(500, detail, "internal", record)


def error_response(
    status: int,
    error: str,
    reason: str,
    record: RequestRecord,
    headers: dict[str, str] | None = None,
    **fields: object,
) -> JSONResponse:
    """An error in the one shape; notes the reason for the metrics."""
    record.reason = reason
    body = ErrorBody(error=error, reason=reason, request_id=record.request_id)
    return JSONResponse(body.model_dump() | fields, status, headers)


def install_error_handlers(app: Starlette) -> None:
    """Make every error of this application, also those of the framework, take the one shape."""
    app.add_exception_handler(RequestRefused, _on_refusal)
    app.add_exception_handler(RequestValidationError, _on_invalid_parameters)
    app.add_exception_handler(HTTPException, _on_http_exception)


async def _on_refusal(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestRefused)
    return refusal_response(error, RequestRecord.of(request.scope))


async def _on_invalid_parameters(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = "; ".join(
        f"{' '.join(str(part) for part in problem['loc'])}: {problem['msg']}, got {str(problem['input'])[:64]!r}"
        for problem in error.errors()
    )
    return refusal_response(InvalidParameterError(found), RequestRecord.of(request.scope))


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = http.HTTPStatus(error.status_code)
    where = f"{request.method} {request.url.path[:256]}"
    detail = {
        404: f"there is nothing at {where}; GET / lists what there is",
        405: f"{where} is not allowed here; see the Allow header and GET /openapi.json",
    }.get(status, str(error.detail))
    reason = status.phrase.lower().replace(" ", "_").replace("-", "_")
    headers = dict(error.headers) if error.headers else None
    return error_response(status, detail, reason, RequestRecord.of(request.scope), headers)
