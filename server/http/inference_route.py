"""The class of the inference routes, for FastAPI."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

TIMEOUT_HEADER = "X-Request-Timeout-S"


class InferenceRoute(APIRoute):
    """A route whose endpoint takes the request, and answers it with a `Response`.

    FastAPI documents the route and validates its parameters. A request without a query or a timeout has no parameters to validate, which
    takes a quarter of the frontend's CPU time: the endpoint is called with the defaults.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        validated = super().get_route_handler()
        fields = (*self.dependant.query_params, *self.dependant.header_params)
        defaults = {field.name: field.get_default() for field in fields}

        async def handle(request: Request) -> Response:
            if request.scope["query_string"] or TIMEOUT_HEADER in request.headers:
                return await validated(request)
            response: Response = await self.endpoint(request=request, **request.path_params, **defaults)
            return response

        return handle
