"""The HTTP frontend: the application that uvicorn runs, put together from its parts."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from config.keys import KeyRing
from server.access import AccessControl, Gate, Rings, need_on_http_port, need_on_operators_port
from server.access_documentation import document_keys
from server.accounts import Accounts, LocalAccounts
from server.admin_routes import AdminRoutes
from server.body import BodyReader
from server.decode_pool import DecodePool
from server.events_feed import EventsFeed
from server.http_errors import STATUS_OF_REASON, install_error_handlers
from server.metrics import Metrics
from server.operations_routes import OperationsRoutes, metrics_response
from server.predict_route import PredictRoute
from server.predictor import Pipeline, Predictor, ServedModel
from server.repository_routes import RepositoryRoutes
from server.request_traces import RequestTraces
from server.request_tracker import RecordStart, RequestTracker
from server.v2.infer_route import InferRoute
from server.v2.routes import V2InferRoutes, V2Routes
from server.v2.signature import Signature
from server.v2.statistics import Statistics


@dataclass(frozen=True)
class FrontendLimits:
    """What one request, and all together, may take."""

    timeout_s: float = 30.0
    """Seconds from a request's arrival to its answer; a client can only shorten it."""
    max_body_bytes: int = 10 * 2**20
    max_held_bytes: int = 512 * 2**20
    """Bytes of bodies held at once over all requests, from the first byte until the image is decoded."""
    max_image_pixels: int = 50_000_000
    """Width times height. A decoded image takes four bytes a pixel, on each decoding thread."""
    exact_images: bool = False
    """Whether images are scaled as torchvision does it, to within one grey level, however large they are."""
    decode_threads: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))
    max_waiting_decodes: int = 256
    max_images: int = 64
    """Most images in one request of the Open Inference Protocol; fewer where so many, unpacked, pass `max_body_bytes`."""
    top_k: int = 5
    """How many classes are answered when the request does not say."""


def create_app(
    pipeline: Pipeline,
    model: ServedModel,
    limits: FrontendLimits,
    metrics: Metrics,
    feed: EventsFeed | None = None,
    gate: Gate | None = None,
    traces: RequestTraces | None = None,
    statistics: Statistics | None = None,
) -> FastAPI:
    """The whole application. Starts nothing by itself; its lifespan runs the feed, and ends the decoding threads.

    Args:
        gate: who may do what; without one, everybody may ask.
        traces: makes spans of the requests; None = nothing is traced.
        feed: shown each change of a replica's state by the leader; without one, events are as late as a second.
        statistics: of all requests, where some come in elsewhere.
    Raises:
        ValueError: the model's sizes cannot be, or it has no classes.
    """
    feed, statistics = feed or EventsFeed(metrics), statistics or Statistics()
    inference = _Inference.of(pipeline, model, limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with inference.decoders, feed.running(pipeline.snapshot):
            yield

    app = FastAPI(
        title="multiworld-serving",
        summary="Image classification that survives the failure of its workers.",
        version=importlib.metadata.version("multiworld-serving"),
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's page loads its scripts from a CDN; /openapi.json has the same for tools
        redoc_url=None,
    )
    app.include_router(inference.predict.router())
    app.include_router(V2Routes(pipeline, inference.infer.signature, statistics).router())
    app.include_router(V2InferRoutes(pipeline, inference.infer.signature, inference.infer).router())
    app.include_router(OperationsRoutes(pipeline, model, metrics, feed).router())
    metrics.outcomes(model.name, model.version, ("predict", "v2"), {"ok": 200, **STATUS_OF_REASON})
    _guard(app, pipeline, LocalAccounts(model.name, metrics, statistics), gate, traces)
    return app


def create_inference_app(
    predictor: Predictor,
    model: ServedModel,
    limits: FrontendLimits,
    accounts: Accounts,
    gate: Gate | None = None,
    traces: RequestTraces | None = None,
) -> FastAPI:
    """The application with nothing but inference. See `create_app`."""
    inference = _Inference.of(predictor, model, limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with inference.decoders:
            yield

    app = FastAPI(lifespan=lifespan, redirect_slashes=False, openapi_url=None)
    app.include_router(inference.predict.router())
    app.include_router(V2InferRoutes(predictor, inference.infer.signature, inference.infer).router())
    _guard(app, predictor, accounts, gate, traces)
    return app


@dataclass(frozen=True)
class _Inference:
    """What answers inference, by both protocols, within the same limits."""

    decoders: DecodePool
    predict: PredictRoute
    infer: InferRoute

    @classmethod
    def of(cls, predictor: Predictor, model: ServedModel, limits: FrontendLimits) -> _Inference:
        if not 1 <= model.crop_size <= model.resize_size:
            raise ValueError(f"crop_size must be 1 to resize_size ({model.resize_size}), not {model.crop_size}")
        if not model.labels:
            raise ValueError("the model must have a label for each of its classes, and has none")
        decoders = DecodePool(threads=limits.decode_threads, max_waiting=limits.max_waiting_decodes)
        bodies = BodyReader(max_body_bytes=limits.max_body_bytes, max_held_bytes=limits.max_held_bytes)
        predict = PredictRoute(
            predictor=predictor,
            model=model,
            bodies=bodies,
            decoders=decoders,
            timeout_s=limits.timeout_s,
            max_image_pixels=limits.max_image_pixels,
            exact_images=limits.exact_images,
            top_k=limits.top_k,
        )
        infer = InferRoute(
            predictor=predictor,
            signature=_signature(model, limits),
            bodies=bodies,
            decoders=decoders,
            timeout_s=limits.timeout_s,
            max_image_pixels=limits.max_image_pixels,
            exact_images=limits.exact_images,
        )
        return cls(decoders, predict, infer)


def _guard(
    app: FastAPI, predictor: Predictor, accounts: Accounts, gate: Gate | None, traces: RequestTraces | None
) -> None:
    """Put around the routes what every request goes through."""
    gate = gate or _open_gate()
    app.add_middleware(AccessControl, gate=gate, need=need_on_http_port)
    app.add_middleware(RequestTracker, predictor=predictor, accounts=accounts, traces=traces)
    install_error_handlers(app)
    if gate.rings.inference:
        document_keys(app)


def _signature(model: ServedModel, limits: FrontendLimits) -> Signature:
    fitting = limits.max_body_bytes // (3 * model.crop_size**2)
    return Signature(model, max_images=max(1, min(limits.max_images, fitting)))


def create_operations_app(
    metrics: Metrics, admin: AdminRoutes, gate: Gate | None = None, repository: RepositoryRoutes | None = None
) -> ASGIApp:
    """The application for the operators' port: GET /metrics, from the same registry, and the admin verbs."""

    def scrape(request: Request) -> Response:
        return metrics_response(metrics, request)

    verbs = [*admin.routes(), *(repository.routes() if repository else ())]
    app = Starlette(routes=[Route("/metrics", scrape), *verbs])
    app.add_middleware(AccessControl, gate=gate or _open_gate(), need=need_on_operators_port)
    app.add_middleware(RecordStart)
    install_error_handlers(app)
    return app


def _open_gate() -> Gate:
    return Gate(Rings(KeyRing(), KeyRing()))
