"""The files of the status page and their response headers."""

from __future__ import annotations

from importlib.resources import files

from starlette.responses import Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    # Only the page's own files, nothing inline: names of workers and models can never run as scripts.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept",  # at `/`, clients other than browsers get JSON
}


def page_response() -> Response:
    """The HTML page."""
    return file_response("index.html")


def file_response(name: str) -> Response:
    """A file of the page. `name` must not come from a client."""
    content = (files("multiworld_serving.server.api") / "status_page" / name).read_bytes()
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(content, headers={**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"})
