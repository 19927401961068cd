"""Creates the ASGI applications of the HTTP port, of the frontends and of the admin port."""

from __future__ import annotations

import importlib.metadata
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from multiworld_serving.common.config.keys import KeySet
from multiworld_serving.server.api.admin import AdminRoutes
from multiworld_serving.server.api.handler.processes import HandlerProcesses
from multiworld_serving.server.api.handler.route import HandlerRoute
from multiworld_serving.server.api.inference import Inference
from multiworld_serving.server.api.middleware import RequestMiddleware
from multiworld_serving.server.api.oip.metadata import Signature
from multiworld_serving.server.api.oip.routes import V2Routes
from multiworld_serving.server.api.operations import OperationsRoutes, Scrape, metrics_response
from multiworld_serving.server.api.predict import NoPredictRoute, PredictRoute
from multiworld_serving.server.auth.authorizer import (
    ApiKeys,
    Authorizer,
    Permission,
    admin_port_permission,
    http_port_permission,
    is_admin_path,
    is_inference_path,
)
from multiworld_serving.server.daemon_threads import DaemonThreads
from multiworld_serving.server.http.errors import DESCRIPTIONS, OtherPort, install_error_handlers
from multiworld_serving.server.http.limits import RequestLimits
from multiworld_serving.server.http.open_request import RequestGate
from multiworld_serving.server.observability.event_feed import EventFeed
from multiworld_serving.server.observability.frontend_metrics import FrontendMetrics
from multiworld_serving.server.observability.request_traces import RequestTraces
from multiworld_serving.server.observability.requests import InferenceProtocol, Requests
from multiworld_serving.server.predictor import Pipeline, ServedModel

_KEY_SCHEME = "key"
_ERROR_CONTENT = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
_CHALLENGE = {"WWW-Authenticate": {"description": "How to send a key.", "schema": {"type": "string"}}}


@dataclass(frozen=True)
class Api:
    """The HTTP API, and what the gRPC API shares with it.

    Attributes:
        app: its lifespan runs the event feed and the decoding threads.
        inference: needs the decoding threads.
    """

    app: FastAPI
    inference: Inference
    requests: Requests


def create_api(
    pipeline: Pipeline,
    model: ServedModel,
    limits: RequestLimits,
    metrics: FrontendMetrics,
    feed: EventFeed | None = None,
    authorizer: Authorizer | None = None,
    traces: RequestTraces | None = None,
    scrape: Scrape | None = None,
    access_log: bool = False,
    admin_port: int | None = None,
    handler: HandlerProcesses | None = None,
    protocols: Sequence[InferenceProtocol] = ("predict", "v2"),
) -> Api:
    """Create the HTTP API.

    Args:
        authorizer: checks permissions; None = no authentication.
        traces: creates a span per traced request; None = no tracing.
        feed: the leader calls its `observe` for each state change; without one, events are up to a second late.
        scrape: the metrics to serve; None = `metrics` alone.
        access_log: log all requests; otherwise failed inference requests only.
        admin_port: number of the admin port, for requests that belong there.
        handler: decodes and encodes the bodies of /predict; None = /predict classifies images.
        protocols: those that are served, whose metrics exist from the start.
    """
    feed = feed or EventFeed(metrics.requests)
    gate = RequestGate(pipeline, limits)
    threads = DaemonThreads(limits.decode_threads, "decode", max_waiting=limits.max_waiting_decodes)
    fitting = limits.max_body_bytes // max(1, model.input_rows.max_row_bytes)
    signature = Signature(model, max_rows=max(1, min(limits.max_rows, fitting)))
    inference = Inference(gate, signature, threads)
    predict: PredictRoute | HandlerRoute | NoPredictRoute = NoPredictRoute(model)
    if handler is not None:
        predict = HandlerRoute(inference, handler)
    elif model.classifies_images:
        predict = PredictRoute(inference)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with threads, feed.running(pipeline.snapshot):
            yield

    app = FastAPI(
        title="multiworld-serving",
        summary="Model serving that survives the failure of its workers.",
        version=importlib.metadata.version("multiworld-serving"),
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's page loads scripts from a CDN; tools can use /openapi.json
        redoc_url=None,
    )
    operations = OperationsRoutes(pipeline, model, scrape or metrics, feed, predict.summary)
    # Not include_router(), which costs a fifth of the time of a small request.
    for routes in (
        predict.router().routes,
        V2Routes(pipeline, inference, metrics.requests).routes(),
        operations.router().routes,
    ):
        app.router.routes.extend(routes)
    metrics.requests.declare(model.name, model.version, protocols)
    metrics.requests.traces, metrics.requests.log_all = traces, access_log
    authorizer = authorizer or _open_access()
    app.add_middleware(
        RequestMiddleware,
        requests=metrics.requests,
        authorizer=authorizer,
        permission_for=http_port_permission,
        version=lambda: pipeline.version.name,
    )
    other = None if admin_port is None else OtherPort("the admin port", admin_port, is_admin_path)
    install_error_handlers(app, other)
    if authorizer.keys.inference:
        _document_authentication(app)
    return Api(app, inference, metrics.requests)


def create_admin_app(
    metrics: Scrape,
    admin: AdminRoutes,
    authorizer: Authorizer | None = None,
    own: Scrape | None = None,
    http_port: int | None = None,
    page: OperationsRoutes | None = None,
) -> ASGIApp:
    """Create the application of the admin port: metrics and admin endpoints.

    Args:
        page: serves the status page.
        own: the metrics of this process alone, for `GET /metrics?own=true`.
        http_port: number of the port of the HTTP API, for requests that belong there.
    """

    async def scrape(request: Request) -> Response:
        return await metrics_response(own if own is not None and "own" in request.query_params else metrics)

    app = Starlette(routes=[Route("/metrics", scrape), *admin.routes(), *(page.admin_routes() if page else ())])
    app.add_middleware(
        RequestMiddleware,
        requests=Requests(CollectorRegistry()),
        authorizer=authorizer or _open_access(),
        permission_for=admin_port_permission,
    )
    install_error_handlers(app, None if http_port is None else OtherPort("the HTTP API", http_port, is_inference_path))
    return app


def _open_access() -> Authorizer:
    return Authorizer(ApiKeys(KeySet(), KeySet()))


def _document_authentication(app: FastAPI) -> None:
    """Add to the OpenAPI document which paths require a key, and their 401 and 403 responses."""
    plain = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            _describe(plain())
        return plain()

    app.openapi = described  # type: ignore[method-assign]  # the way that FastAPI documents


def _describe(document: dict[str, Any]) -> None:
    scheme = {"type": "http", "scheme": "bearer", "description": "A key of --api-keys-file or --admin-keys-file."}
    document.setdefault("components", {})["securitySchemes"] = {_KEY_SCHEME: scheme}
    for path, operations in document["paths"].items():
        if http_port_permission(path) is Permission.NOTHING:
            continue
        for operation in operations.values():
            operation["security"] = [{_KEY_SCHEME: []}]
            operation["responses"]["401"] = {
                "description": DESCRIPTIONS[401],
                "content": _ERROR_CONTENT,
                "headers": _CHALLENGE,
            }
            operation["responses"]["403"] = {"description": DESCRIPTIONS[403], "content": _ERROR_CONTENT}
