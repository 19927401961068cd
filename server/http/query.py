"""Refuses unknown query parameters, so that a misspelled one is not silently ignored."""

from __future__ import annotations

import difflib
from urllib.parse import parse_qsl

from fastapi.routing import APIRoute
from starlette.requests import Request

from multiworld_serving.server.errors import InvalidParameterError


async def refuse_unknown_parameters(request: Request) -> None:
    """Dependency of a route. Raises InvalidParameterError."""
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
