"""Probes, metrics, status, events, and the status page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from multiworld_serving.common.metrics import CONTENT_TYPE
from multiworld_serving.server.api.oip.metadata import readiness_error
from multiworld_serving.server.http.errors import rejection_response
from multiworld_serving.server.http.route import Endpoint, route
from multiworld_serving.server.observability.event_feed import EventFeed, EventStream
from multiworld_serving.server.observability.requests import RequestRecord
from multiworld_serving.server.predictor import Pipeline, ServedModel

_PAGE_PATH = "/status-page"
_FILE_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "jpg": "image/jpeg",
}
_FOLDER = files("multiworld_serving.server.api") / "status_page"
_FILE_HEADERS = {
    # Only the page's own files, nothing inline: names of workers and models can never run as scripts.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept",  # at `/`, clients other than browsers get JSON
}


class Scrape(Protocol):
    """Source of the metrics to serve."""

    async def scrape(self) -> bytes:
        """The metrics in Prometheus' text format."""
        ...


@dataclass(frozen=True)
class OperationsRoutes:
    """The routes of the HTTP port that are not inference.

    Attributes:
        predict: what POST /predict does, for the list of endpoints; empty if this model has none.
    """

    predictor: Pipeline
    model: ServedModel
    metrics: Scrape
    feed: EventFeed
    predict: str = ""

    def routes(self) -> list[Route]:
        """The routes of the HTTP port."""
        return [
            route("/", self.index),
            route("/events", self.events),
            route("/healthz", self.healthz),
            route("/readyz", self.readyz),
            route("/status", self.status),
            route("/metrics", self.scrape),
            *_file_routes(),
        ]

    async def index(self, request: Request) -> Response:
        """The list of endpoints; for browsers, the status page."""
        endpoints = {
            "GET /": "this list; for browsers, the status page",
            **({"POST /predict": self.predict} if self.predict else {}),
            "GET /v2": "Open Inference Protocol: /v2/models/MODEL, /v2/models/MODEL/infer, …",
            "GET /healthz": "liveness",
            "GET /readyz": "readiness",
            "GET /status": "current state of stages and replicas",
            "GET /events": "state and events as server-sent events",
            "GET /metrics": "Prometheus metrics",
            "GET /openapi.json": "OpenAPI document",
        }
        return _index_response(request, self._listing(endpoints))

    def _listing(self, endpoints: Mapping[str, str]) -> dict[str, Any]:
        return {
            "service": "multiworld-serving",
            "model": self.model.name,
            "version": self.predictor.version.name,
            "endpoints": endpoints,
        }

    def admin_routes(self) -> list[Route]:
        """The status page for the admin port, where it offers operator actions."""

        async def index(request: Request) -> Response:
            return _index_response(request, self._listing(_ADMIN_ENDPOINTS))

        return [route("/", index), route("/events", self.events), *_file_routes()]

    async def events(self, request: Request) -> Response:
        """Server-sent events: snapshot (`status`) and rates (`points`) every second, and events (`event`) as they happen."""
        last_id = request.headers.get("last-event-id", "")
        known = int(last_id) if last_id.isdecimal() and len(last_id) < 19 else 0
        return EventStream(self.feed, known)

    async def healthz(self, _: Request) -> Response:
        """Liveness of this process, regardless of the workers: restarting the leader would not repair them."""
        return JSONResponse({"alive": True})

    async def readyz(self, request: Request) -> Response:
        """Readiness: every stage has a replica that passed its join self-test."""
        if self.predictor.ready:
            return JSONResponse({"ready": True, "model": self.model.name, "version": self.predictor.version.name})
        snapshot = self.predictor.snapshot()
        missing = list(snapshot.missing_stages)
        record = RequestRecord.of(request.scope)
        return rejection_response(readiness_error(snapshot), record, ready=False, missing_stages=missing)

    async def status(self, _: Request) -> Response:
        """The current state of the pipeline: stages and replicas."""
        return Response(msgspec.json.encode(self.predictor.snapshot()), media_type="application/json")

    async def scrape(self, _: Request) -> Response:
        """The metrics of all processes in Prometheus' text format."""
        return await metrics_response(self.metrics)


def _index_response(request: Request, listing: Mapping[str, Any]) -> Response:
    """The response of `/`: the page for browsers, and `listing` as JSON for programs."""
    if "text/html" in request.headers.get("accept", ""):
        return _file_response("index.html")
    return JSONResponse(listing, headers={"Vary": "Accept"})


def _file_routes() -> list[Route]:
    """One route for each file of the page. No path comes from a client."""
    return [route(f"{_PAGE_PATH}/{file.name}", _file_endpoint(file.name)) for file in _FOLDER.iterdir()]


def _file_endpoint(name: str) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        return _file_response(name)

    return endpoint


def _file_response(name: str) -> Response:
    kind = _FILE_TYPES[name.rpartition(".")[2]]
    return Response((_FOLDER / name).read_bytes(), headers={**_FILE_HEADERS, "Content-Type": kind})


async def metrics_response(metrics: Scrape) -> Response:
    """The response to a scrape."""
    return Response(await metrics.scrape(), headers={"Content-Type": CONTENT_TYPE})


_ADMIN_ENDPOINTS = {
    "GET /": "this list; for browsers, the status page with operator actions",
    "GET /events": "state and events as server-sent events",
    "GET /metrics": "Prometheus metrics",
    "POST /admin/rolling-restart": "restart all workers in turn",
    "POST /v2/repository/index": "the versions of the model",
    "POST /v2/repository/models/MODEL/load": "load a version",
    "POST /v2/repository/models/MODEL/unload": "unload the model",
}
