"""The class of the inference routes, for FastAPI, and the check of query parameters that all routes share."""

from __future__ import annotations

import difflib
from typing import Annotated, Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Depends, Header
from fastapi.routing import APIRoute
from pydantic import Field
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from multiworld_serving.server.errors import InvalidParameterError

TIMEOUT_HEADER = "X-Request-Timeout-S"

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)] | SkipJsonSchema[None]
"""The header is optional, but the text "null" is not a valid value."""


def timeout_parameter(limit_s: float) -> Any:
    """The header in which a client sends its timeout."""
    description = f"Timeout in seconds; can only shorten the server's {limit_s:g}."
    return Header(None, alias=TIMEOUT_HEADER, description=description)


class InferenceRoute(APIRoute):
    """A route whose endpoint takes the request, and answers it with a `Response`.

    FastAPI documents the route and validates its parameters. A request without a query or a timeout has no parameters to validate, which
    takes a quarter of the frontend's CPU time: the endpoint is called with the defaults.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        fields = (*self.dependant.query_params, *self.dependant.header_params)
        self._defaults = {field.name: field.get_default() for field in fields}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if scope["query_string"] or TIMEOUT_HEADER in request.headers or scope["method"] != "POST":
            await super().handle(scope, receive, send)  # refuses other methods too
            return
        response = await self.endpoint(request=request, **scope["path_params"], **self._defaults)
        await response(scope, receive, send)


def inference_router(tag: str) -> APIRouter:
    """A router of inference routes."""
    return APIRouter(tags=[tag], route_class=InferenceRoute, dependencies=[Depends(refuse_unknown_parameters)])


async def refuse_unknown_parameters(request: Request) -> None:
    """Dependency of a route. A misspelled query parameter is not ignored. Raises InvalidParameterError."""
    if not (query := request.scope["query_string"]):
        return
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = [parameter.alias for parameter in route.dependant.query_params]
    for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            expected = f"did you mean {near[0]}?" if near else f"expected {' or '.join(known) or 'none'}"
            raise InvalidParameterError(f"unknown query parameter {name[:64]!r}: {expected}")
