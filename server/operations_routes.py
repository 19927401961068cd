"""What probes, scrapers, operators and browsers ask: alive, ready, metrics, status, and the page that shows it live."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.requests import Request

from server.errors import DrainingError, NotReadyError, RequestRefused
from server.event_stream import EventStream
from server.events_feed import EventsFeed
from server.http_errors import ErrorBody, error_documentation, refusal_response
from server.metrics import Metrics
from server.predictor import Pipeline, PipelineSnapshot, ServedModel
from server.request_record import RequestRecord
from server.status_files import file_response, page_response


class Alive(BaseModel):
    """The process answers."""

    alive: bool = True


class Ready(BaseModel):
    """Every stage has a replica that passed its canary."""

    ready: bool = True
    model: str
    version: str


class NotReady(ErrorBody):
    """Why not."""

    ready: bool = False
    missing_stages: list[int] = Field(description="Stages without a ready replica.")


@dataclass(frozen=True)
class OperationsRoutes:
    """What answers everything but inference."""

    predictor: Pipeline
    model: ServedModel
    metrics: Metrics
    feed: EventsFeed

    def router(self) -> APIRouter:
        """The routes, documented for OpenAPI."""
        router = APIRouter(tags=["operations"])
        router.add_api_route("/", self.index, response_model=dict[str, Any])
        router.add_api_route("/events", self.events, response_class=Response, responses=_EVENTS_DOCUMENTATION)
        for name in ("page.css", "page.js"):
            router.add_api_route(f"/status-page/{name}", partial(_file, name), include_in_schema=False)
        router.add_api_route("/healthz", self.healthz, response_model=Alive)
        ready_errors = error_documentation((503,))
        ready_errors[503]["model"] = NotReady
        router.add_api_route("/readyz", self.readyz, response_model=Ready, responses=ready_errors)
        router.add_api_route("/status", self.status, response_model=PipelineSnapshot)
        router.add_api_route("/metrics", self.scrape, response_class=Response, responses=_METRICS_DOCUMENTATION)
        return router

    async def index(self, request: Request) -> Any:
        """What there is; for browsers, the status page."""
        if "text/html" in request.headers.get("accept", ""):
            return page_response()
        endpoints = {
            "GET /": "this list; for browsers, the status page",
            "POST /predict": "classify an image: curl -F image=@photo.jpg http://HOST:PORT/predict",
            "GET /v2": "the same by the Open Inference Protocol: /v2/models/MODEL, /v2/models/MODEL/infer, …",
            "GET /healthz": "alive?",
            "GET /readyz": "ready for requests?",
            "GET /status": "stages and replicas as they are now",
            "GET /events": "the same and what happens, live, as server-sent events",
            "GET /metrics": "for Prometheus",
            "GET /openapi.json": "the API, for tools",
        }
        content = {
            "service": "multiworld-serving",
            "model": self.model.name,
            "version": self.predictor.version.name,
            "endpoints": endpoints,
        }
        return JSONResponse(content, headers={"Vary": "Accept"})

    async def events(self, request: Request) -> Response:
        """How the pipeline stands (`status`) and serves (`points`), each second, and what happens (`event`), at once."""
        last_id = request.headers.get("last-event-id", "")
        return EventStream(self.feed, self.predictor, int(last_id) if last_id.isdecimal() and len(last_id) < 19 else 0)

    async def healthz(self) -> Alive:
        """Whether the process answers. It says nothing about workers: a restart of the leader would not heal those."""
        return Alive()

    async def readyz(self, request: Request) -> Response:
        """Whether requests are answered: every stage has a replica that passed its canary."""
        if self.predictor.ready:
            return JSONResponse(Ready(model=self.model.name, version=self.predictor.version.name).model_dump())
        snapshot = self.predictor.snapshot()
        missing = list(snapshot.missing_stages)
        record = RequestRecord.of(request.scope)
        return refusal_response(why_not_ready(snapshot), record, ready=False, missing_stages=missing)

    async def status(self) -> PipelineSnapshot:
        """The pipeline as it is now: stages, their replicas, and what those do."""
        return self.predictor.snapshot()

    def scrape(self, request: Request) -> Response:
        """All metrics, in the text format of Prometheus or OpenMetrics."""
        return metrics_response(self.metrics, request)  # not async: a scrape of many workers takes milliseconds


async def _file(name: str) -> Response:
    return file_response(name)


def metrics_response(metrics: Metrics, request: Request) -> Response:
    """The answer to a scrape."""
    text, content_type = metrics.exposition(request.headers.get("accept", ""))
    return Response(text, headers={"Content-Type": content_type})


def why_not_ready(snapshot: PipelineSnapshot) -> RequestRefused:
    """The refusal that says what is missing."""
    if snapshot.draining:
        return DrainingError("the server is stopping and takes no new requests; ask another one")
    if snapshot.unloaded:
        return NotReadyError("the model is unloaded: whoever runs the service must load it before it answers")
    missing = [
        f"stage {stage.index} has no ready replica ({', '.join(replica.state for replica in stage.replicas) or 'none'})"
        for stage in snapshot.stages
        if not stage.ready_replicas
    ]
    return NotReadyError(f"not ready: {'; '.join(missing) or 'the pipeline is not complete'}; wait for workers to join")


_METRICS_DOCUMENTATION: dict[int | str, dict[str, Any]] = {
    200: {"description": "Metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}
_EVENTS_DOCUMENTATION: dict[int | str, dict[str, Any]] = {
    200: {"description": "Server-sent events.", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
    **error_documentation((429,)),
}
