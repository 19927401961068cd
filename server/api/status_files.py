"""The files of the status page and their response headers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

PATH = "/status-page"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "jpg": "image/jpeg",
}
_FOLDER = files("multiworld_serving.server.api") / "status_page"
_HEADERS = {
    # Only the page's own files, nothing inline: names of workers and models can never run as scripts.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept",  # at `/`, clients other than browsers get JSON
}


def index_response(request: Request, listing: Mapping[str, Any]) -> Response:
    """The response of `/`: the page for browsers, and `listing` as JSON for programs."""
    if "text/html" in request.headers.get("accept", ""):
        return _response("index.html")
    return JSONResponse(listing, headers={"Vary": "Accept"})


def file_routes() -> list[Route]:
    """One route for each file of the page. No path comes from a client."""
    return [Route(f"{PATH}/{file.name}", _endpoint(file.name)) for file in _FOLDER.iterdir()]


def _endpoint(name: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(_: Request) -> Response:
        return _response(name)

    return endpoint


def _response(name: str) -> Response:
    kind = _TYPES[name.rpartition(".")[2]]
    return Response((_FOLDER / name).read_bytes(), headers={**_HEADERS, "Content-Type": kind})
