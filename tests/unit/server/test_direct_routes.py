"""Requests without parameters bypass FastAPI; the others do not."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from multiworld_serving.server.errors import OverloadedError
from multiworld_serving.server.http.direct_routes import DirectRoutes
from multiworld_serving.server.observability.request_record import RequestRecord


async def _status(app: DirectRoutes, **fields: object) -> int:
    scope: Scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": b"", "headers": [], **fields}
    RequestRecord.begin(scope, "v1")
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app(scope, receive, send)
    status: int = messages[0]["status"]
    return status


async def _fastapi(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(status_code=201)(scope, receive, send)


async def _handler(_: Request) -> Response:
    return Response(status_code=200)


async def _rejecting(_: Request) -> Response:
    raise OverloadedError("the queue is full", retry_after_s=1.0)


async def test_request_without_parameters_is_answered_by_the_handler() -> None:
    assert await _status(DirectRoutes(_fastapi, handlers={"/predict": _handler})) == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"query_string": b"top_k=3"},
        {"headers": [(b"x-request-timeout-s", b"2")]},
        {"method": "GET"},
        {"path": "/predict/"},
    ],
    ids=str,
)
async def test_any_other_request_is_answered_by_fastapi(fields: dict[str, object]) -> None:
    assert await _status(DirectRoutes(_fastapi, handlers={"/predict": _handler}), **fields) == 201


async def test_rejection_of_the_handler_becomes_a_response() -> None:
    assert await _status(DirectRoutes(_fastapi, handlers={"/predict": _rejecting})) == 429
