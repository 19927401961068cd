"""Creates the ASGI applications of the HTTP port, of the frontends and of the admin port."""

from __future__ import annotations

import importlib.metadata
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import Depends, FastAPI
from fastapi.responses import Response
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from multiworld_serving.common.config.keys import KeySet
from multiworld_serving.server.api.admin import AdminRoutes
from multiworld_serving.server.api.decode_pool import DecodePool
from multiworld_serving.server.api.handler.processes import HandlerProcesses
from multiworld_serving.server.api.handler.route import HandlerRoute
from multiworld_serving.server.api.oip.infer_route import InferRoute
from multiworld_serving.server.api.oip.inference import OipInference
from multiworld_serving.server.api.oip.metadata import Signature
from multiworld_serving.server.api.oip.routes import V2InferRoutes, V2Routes
from multiworld_serving.server.api.operations import OperationsRoutes, Scrape, metrics_response
from multiworld_serving.server.api.predict import NoPredictRoute, PredictRoute
from multiworld_serving.server.api.repository import RepositoryRoutes
from multiworld_serving.server.auth.authorizer import (
    ApiKeys,
    AuthorizationMiddleware,
    Authorizer,
    admin_port_permission,
    http_port_permission,
    is_admin_path,
    is_inference_path,
)
from multiworld_serving.server.auth.openapi_security import document_authentication
from multiworld_serving.server.http.access_log import AccessLog
from multiworld_serving.server.http.body import BodyReader
from multiworld_serving.server.http.errors import STATUS_OF_REASON, OtherPort, install_error_handlers
from multiworld_serving.server.http.limits import RequestLimits
from multiworld_serving.server.http.query import refuse_unknown_parameters
from multiworld_serving.server.http.request_tracker import RequestIdMiddleware, RequestObserver, RequestTracker
from multiworld_serving.server.observability.event_feed import EventFeed
from multiworld_serving.server.observability.frontend_metrics import FrontendMetrics
from multiworld_serving.server.observability.request_record import InferenceProtocol
from multiworld_serving.server.observability.request_traces import RequestTraces
from multiworld_serving.server.predictor import Pipeline, Predictor, ServedModel


@dataclass(frozen=True)
class Api:
    """The HTTP API, and what the gRPC API shares with it.

    Attributes:
        app: its lifespan runs the event feed and the decoding threads.
        inference: needs the decoding threads.
    """

    app: FastAPI
    inference: OipInference
    observer: RequestObserver


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
    inference = _Inference.of(pipeline, model, limits, handler)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with inference.decoders, feed.running(pipeline.snapshot):
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
    strict = [Depends(refuse_unknown_parameters)]
    app.include_router(inference.predict.router(), dependencies=strict)
    signature = inference.oip.signature
    app.include_router(V2Routes(pipeline, signature, metrics.requests).router(), dependencies=strict)
    app.include_router(V2InferRoutes(pipeline, signature, InferRoute(inference.oip)).router(), dependencies=strict)
    operations = OperationsRoutes(pipeline, model, scrape or metrics, feed, inference.predict.summary)
    app.include_router(operations.router())
    metrics.requests.declare(model.name, model.version, protocols, {"ok": 200, **STATUS_OF_REASON})
    observer = RequestObserver(metrics.requests, traces, AccessLog(every_request=access_log))
    other = None if admin_port is None else OtherPort("the admin port", admin_port, is_admin_path)
    _guard(app, pipeline, observer, authorizer, other)
    return Api(app, inference.oip, observer)


@dataclass(frozen=True)
class _Inference:
    """The inference routes of both protocols, with shared limits."""

    decoders: DecodePool
    predict: PredictRoute | HandlerRoute | NoPredictRoute
    oip: OipInference

    @classmethod
    def of(
        cls, predictor: Predictor, model: ServedModel, limits: RequestLimits, handler: HandlerProcesses | None
    ) -> _Inference:
        decoders = DecodePool(threads=limits.decode_threads, max_waiting=limits.max_waiting_decodes)
        bodies = BodyReader(max_body_bytes=limits.max_body_bytes, max_held_bytes=limits.max_held_bytes)
        signature = _signature(model, limits)
        predict: PredictRoute | HandlerRoute | NoPredictRoute = NoPredictRoute(model)
        if handler is not None:
            predict = HandlerRoute(predictor, model, handler, bodies, limits.timeout_s, signature.max_rows)
        elif model.classifies_images:
            predict = PredictRoute(
                predictor=predictor,
                model=model,
                bodies=bodies,
                decoders=decoders,
                timeout_s=limits.timeout_s,
                max_image_pixels=limits.max_image_pixels,
                top_k=limits.top_k,
            )
        oip = OipInference(
            predictor=predictor,
            signature=signature,
            bodies=bodies,
            decoders=decoders,
            timeout_s=limits.timeout_s,
            max_image_pixels=limits.max_image_pixels,
        )
        return cls(decoders, predict, oip)


def _guard(
    app: FastAPI,
    predictor: Predictor,
    observer: RequestObserver,
    authorizer: Authorizer | None,
    other_port: OtherPort | None,
) -> None:
    """Add the middleware and error handlers that apply to every request."""
    authorizer = authorizer or _open_access()
    app.add_middleware(AuthorizationMiddleware, authorizer=authorizer, permission_for=http_port_permission)
    app.add_middleware(RequestTracker, predictor=predictor, observer=observer)
    install_error_handlers(app, other_port)
    if authorizer.keys.inference:
        document_authentication(app)


def _signature(model: ServedModel, limits: RequestLimits) -> Signature:
    fitting = limits.max_body_bytes // max(1, model.input_rows.max_row_bytes)
    return Signature(model, max_rows=max(1, min(limits.max_rows, fitting)))


def create_admin_app(
    metrics: Scrape,
    admin: AdminRoutes,
    authorizer: Authorizer | None = None,
    repository: RepositoryRoutes | None = None,
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

    verbs = [*admin.routes(), *(repository.routes() if repository else ())]
    app = Starlette(routes=[Route("/metrics", scrape), *verbs, *(page.admin_routes() if page else ())])
    app.add_middleware(
        AuthorizationMiddleware, authorizer=authorizer or _open_access(), permission_for=admin_port_permission
    )
    app.add_middleware(RequestIdMiddleware)
    install_error_handlers(app, None if http_port is None else OtherPort("the HTTP API", http_port, is_inference_path))
    return app


def _open_access() -> Authorizer:
    return Authorizer(ApiKeys(KeySet(), KeySet()))
