"""The files of the status page, and with which headers they travel."""

from __future__ import annotations

from importlib.resources import files

from starlette.responses import Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    # Nothing from elsewhere, nothing inline: what a worker or a model calls itself can never run.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept",  # at `/`, others than browsers get JSON
}


def page_response() -> Response:
    """The page itself."""
    return file_response("index.html")


def file_response(name: str) -> Response:
    """One of its files, by a name of ours."""
    content = (files("server") / "status_page" / name).read_bytes()
    kind = _TYPES[name.rpartition(".")[2]]
    return Response(content, headers={**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"})
