"""Probes, metrics, status, events, the status page, and the OpenAPI document."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Awaitable, Callable, Mapping
from importlib.resources import files
from mimetypes import guess_type
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from multiworld_serving.common.metrics import CONTENT_TYPE
from multiworld_serving.common.service.snapshots import PipelineSnapshot
from multiworld_serving.server.frontend.api.groups import ModelGroups
from multiworld_serving.server.frontend.api.oip.metadata import readiness_error
from multiworld_serving.server.frontend.http.error_responses import rejection_response
from multiworld_serving.server.frontend.http.limits import RequestLimits
from multiworld_serving.server.frontend.http.route import route
from multiworld_serving.server.frontend.observability.request_records import RequestRecord

Scrape = Callable[[], Awaitable[bytes]]
"""Returns metrics in Prometheus' text format."""

_FOLDER = files("multiworld_serving.server.frontend.api")
_FILES = {file.name: file for file in (_FOLDER / "status_page").iterdir()}
_FILE_HEADERS = {
    # Only the page's own files, nothing inline: names of workers and models can never run as scripts.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
    "Vary": "Accept",  # at `/`, clients other than browsers get JSON
}


def status_page_routes(groups: ModelGroups, endpoints: Callable[[], Mapping[str, str]]) -> list[Route]:
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


def operations_routes(groups: ModelGroups, scrape: Scrape) -> list[Route]:
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


def openapi_document(groups: ModelGroups, *, needs_key: bool) -> dict[str, Any]:
    """`openapi.json`, completed with what depends on the models and the settings.

    Args:
        groups: the models that serve now.
        needs_key: whether inference needs a key.
    """
    document: dict[str, Any] = json.loads((_FOLDER / "openapi.json").read_text("utf-8"))
    described = [(group, group.inference) for group in groups if group.inference is not None]
    models = [inference.signature.model for _, inference in described]
    document["info"]["version"] = importlib.metadata.version("multiworld-serving")
    if not needs_key:
        del document["security"]
    paths, components = document["paths"], document["components"]
    images, of_pipeline = paths.pop("/predict"), paths.pop("/predict of a pipeline")
    able = [group for group, _ in described if group.serves_predict]
    named = {f"_{group.model}": group for group in able if len(able) > 1}
    for suffix, group in ({"": groups.of_predict} | named).items():
        if group in able:
            pipeline = group.described().signature.model.pipeline
            operation = (images if pipeline is None else of_pipeline)["post"] | {"operationId": f"predict{suffix}"}
            if pipeline is not None and pipeline.request_schema is not None:
                body = {"required": True, "content": {"application/json": {"schema": pipeline.request_schema}}}
                operation["requestBody"] = body
            paths["/predict" + suffix.replace("_", "/", 1)] = {"post": operation}
            if group.path:
                paths[group.path] = {"post": operation | {"operationId": f"pipeline_{group.name}"}}
    parameters = components["parameters"]
    parameters["model"]["schema"]["enum"] = groups.names
    parameters["version"]["schema"]["enum"] = sorted({str(group.version.number) for group, _ in described})
    labels = max((len(model.labels) for model in models), default=0)
    parameters["top_k"]["schema"] |= {"maximum": labels, "default": min(RequestLimits.top_k, labels)}
    inputs = components["requestBodies"]["infer"]["content"]["application/json"]["schema"]["properties"]["inputs"]
    inputs["items"]["properties"]["name"]["enum"] = sorted({each.name for model in models for each in model.inputs})
    _, of_status = msgspec.json.schema_components([PipelineSnapshot], ref_template="#/components/schemas/{name}")
    components["schemas"] |= of_status
    return document
