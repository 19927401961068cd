"""Probes, metrics, status, events, and the status page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from mimetypes import guess_type

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from multiworld_serving.common.metrics import CONTENT_TYPE
from multiworld_serving.server.frontend.api.groups import Groups
from multiworld_serving.server.frontend.api.oip.metadata import readiness_error
from multiworld_serving.server.frontend.http.errors import rejection_response
from multiworld_serving.server.frontend.http.route import route
from multiworld_serving.server.frontend.observability.requests import RequestRecord

Scrape = Callable[[], Awaitable[bytes]]
"""Returns metrics in Prometheus' text format."""

_FILES = {file.name: file for file in (files("multiworld_serving.server.frontend.api") / "status_page").iterdir()}
_FILE_HEADERS = {
    # Only the page's own files, nothing inline: names of workers and models can never run as scripts.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept",  # at `/`, clients other than browsers get JSON
}


def status_page_routes(groups: Groups, endpoints: Callable[[], Mapping[str, str]]) -> list[Route]:
    """The routes of the status page of a port with these endpoints. On the admin port it offers operator actions."""

    async def index(request: Request) -> Response:
        """For browsers, the page; for programs, the list of endpoints."""
        if "text/html" in request.headers.get("accept", ""):
            return _file_response("index.html")
        now = groups.chosen(request).pool.snapshot()
        found: dict[str, object] = {"service": "multiworld-serving", "model": now.model, "version": now.version}
        if groups.only is None:
            found["models"] = groups.names
        return JSONResponse(found | {"endpoints": endpoints()}, headers={"Vary": "Accept"})

    async def events(request: Request) -> Response:
        """Server-sent events every second: snapshot (`status`), rates (`points`), and what has happened (`event`)."""
        if request.method == "HEAD":  # the stream does not end
            return Response(media_type="text/event-stream")
        group = groups.chosen(request)
        return group.feed.response(lambda: groups.snapshot(group))

    return [route("/", index), route("/events", events), route("/status-page/{name}", _file)]


def operations_routes(groups: Groups, scrape: Scrape) -> list[Route]:
    """The routes of the HTTP port for probes, status and metrics.

    Args:
        scrape: returns the metrics of all processes.
    """

    async def healthz(_: Request) -> Response:
        """Liveness of this process, regardless of the workers: restarting the leader would not repair them."""
        return JSONResponse({"alive": True})

    async def readyz(request: Request) -> Response:
        """Readiness for requests: a model is ready. One that fails must not take the others out of a load balancer."""
        ready = [group.name for group in groups if group.pool.ready]
        waiting = None if ready else groups.not_ready
        if ready and groups.only is None:
            return JSONResponse({"ready": True, "models": ready})
        snapshot = groups.snapshot(waiting or next(iter(groups)))
        if waiting is None:
            return JSONResponse({"ready": True, "model": snapshot.model, "version": snapshot.version})
        missing, record = list(snapshot.missing_stages), RequestRecord.of(request.scope)
        return rejection_response(readiness_error(snapshot), record, ready=False, missing_stages=missing)

    async def status(request: Request) -> Response:
        """The current state of the pipeline of one model: stages and replicas. Also lists all models."""
        found = groups.snapshot(groups.chosen(request))
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def metrics(_: Request) -> Response:
        return await metrics_response(scrape)

    return [
        route("/healthz", healthz),
        route("/readyz", readyz),
        route("/status", status),
        route("/metrics", metrics),
    ]


async def _file(request: Request) -> Response:
    return _file_response(request.path_params["name"])


def _file_response(name: str) -> Response:
    if name not in _FILES:
        raise HTTPException(404)
    return Response(_FILES[name].read_bytes(), headers=_FILE_HEADERS, media_type=guess_type(name)[0])


async def metrics_response(scrape: Scrape) -> Response:
    """The response to a scrape."""
    return Response(await scrape(), headers={"Content-Type": CONTENT_TYPE})
