"""The paths of the Open Inference Protocol, version 2, over HTTP, with Triton's extensions for statistics and configuration."""

from __future__ import annotations

import base64
import importlib.metadata
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from fastapi import APIRouter, Path
from fastapi.responses import Response
from PIL import Image
from starlette.requests import Request

from server.answer_headers import HEADER_DOCUMENTATION
from server.errors import UnknownModelError
from server.http_errors import error_documentation
from server.images import MIN_SIDE
from server.operations_routes import why_not_ready
from server.predict_route import Seconds, timeout_parameter
from server.predictor import Pipeline, Predictor
from server.v2.infer_answer import HEADER_LENGTH
from server.v2.infer_route import InferRoute
from server.v2.repository_index import repository_index
from server.v2.signature import INPUT, Signature
from server.v2.statistics import Statistics

_TAG = "open inference protocol"
_EXTENSIONS = ["binary_tensor_data", "classification", "model_configuration", "statistics"]

Facts = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class _OfTheModel:
    """What routes with a model's name and version in their path have in common."""

    predictor: Predictor
    signature: Signature

    def _path_parameters(self) -> tuple[Any, Any]:
        """Name and version, described with the only values that are not 404."""
        name = Path(description="The served model's name.", json_schema_extra={"enum": [self.signature.model.name]})
        now = str(self.predictor.version.number)
        says = "The number of the version that serves; this document names the one that served when it was made."
        version = Path(description=says, json_schema_extra={"enum": [now]})
        return name, version

    def _check(self, model: str, version: str | None = None) -> None:
        served, now = self.signature.model, self.predictor.version
        if model != served.name:
            raise UnknownModelError(f"there is no model {model[:64]!r}; the only one is {served.name!r}")
        if version is not None and version != str(now.number):
            raise UnknownModelError(
                f"the model {served.name!r} has no version {version[:64]!r}; the only one is {str(now.number)!r}, "
                f"with the weights {now.name}"
            )


@dataclass(frozen=True)
class V2Routes(_OfTheModel):
    """What answers everything under /v2 but inference."""

    predictor: Pipeline
    statistics: Statistics

    def router(self) -> APIRouter:
        """The routes, documented for OpenAPI."""
        router = APIRouter(tags=[_TAG])
        not_ready = error_documentation((503,))
        router.add_api_route("/v2", self.server, response_model=dict[str, Any])
        router.add_api_route("/v2/health/live", self.live, response_model=dict[str, bool])
        router.add_api_route("/v2/health/ready", self.ready, response_model=dict[str, bool], responses=not_ready)
        router.add_api_route("/v2/models/stats", self.all_statistics, response_model=dict[str, Any])
        router.add_api_route("/v2/repository/index", self.index, methods=["POST"], response_model=list[dict[str, str]])
        self._add_facts(router, "", self._metadata, "The model's inputs and outputs.")
        self._add_facts(router, "/config", self._config, "The model's configuration, as Triton has it.")
        self._add_facts(router, "/stats", self._statistics, "What inference has taken since the start.")
        self._add_facts(router, "/ready", self._model_ready, "Whether requests are answered.", not_ready)
        return router

    async def server(self) -> dict[str, Any]:
        """The server's name, version and extensions of the protocol."""
        version = importlib.metadata.version("multiworld-serving")
        return {"name": "multiworld-serving", "version": version, "extensions": _EXTENSIONS}

    async def live(self) -> dict[str, bool]:
        """Whether the process answers."""
        return {"live": True}

    async def ready(self) -> dict[str, bool]:
        """Whether requests are answered."""
        self._check_ready()
        return {"ready": True}

    async def all_statistics(self) -> dict[str, Any]:
        """What inference has taken since the start."""
        return self._statistics()

    async def index(self) -> list[dict[str, str]]:
        """The one model, and whether it serves."""
        return repository_index(self.predictor.snapshot())

    def _add_facts(
        self,
        router: APIRouter,
        suffix: str,
        facts: Facts,
        summary: str,
        errors: dict[int | str, dict[str, Any]] | None = None,
    ) -> None:
        model_parameter, version_parameter = self._path_parameters()

        async def of_model(model: str = model_parameter) -> dict[str, Any]:
            self._check(model)
            return facts()

        async def of_version(model: str = model_parameter, version: str = version_parameter) -> dict[str, Any]:
            self._check(model, version)
            return facts()

        responses = {**error_documentation((404, 422)), **(errors or {})}
        endpoints: dict[str, Callable[..., Awaitable[dict[str, Any]]]]
        endpoints = {"": of_model, "/versions/{version}": of_version}
        for path, endpoint in endpoints.items():
            router.add_api_route(
                f"/v2/models/{{model}}{path}{suffix}",
                endpoint,
                name=f"model{suffix.replace('/', '_')}",
                summary=summary,
                response_model=dict[str, Any],
                responses=responses,
            )

    def _check_ready(self) -> None:
        if not self.predictor.ready:
            raise why_not_ready(self.predictor.snapshot())

    def _metadata(self) -> dict[str, Any]:
        return self.signature.metadata(self.predictor.version)

    def _config(self) -> dict[str, Any]:
        return self.signature.config(self.predictor.version)

    def _model_ready(self) -> dict[str, Any]:
        self._check_ready()
        return {"name": self.signature.model.name, "ready": True}

    def _statistics(self) -> dict[str, Any]:
        return {"model_stats": [self.statistics.as_json(self.signature.model.name, str(self.predictor.version.number))]}


@dataclass(frozen=True)
class V2InferRoutes(_OfTheModel):
    """What answers inference under /v2."""

    inference: InferRoute

    def router(self) -> APIRouter:
        """The routes, documented for OpenAPI."""
        router = APIRouter(tags=[_TAG])
        timeout_header = timeout_parameter(self.inference.timeout_s)
        model_parameter, version_parameter = self._path_parameters()

        async def of_model(
            request: Request, model: str = model_parameter, timeout_s: Seconds = timeout_header
        ) -> Response:
            self._check(model)
            return await self.inference.infer(request, timeout_s)

        async def of_version(
            request: Request,
            model: str = model_parameter,
            version: str = version_parameter,
            timeout_s: Seconds = timeout_header,
        ) -> Response:
            self._check(model, version)
            return await self.inference.infer(request, timeout_s, version=int(version))

        endpoints: dict[str, Callable[..., Awaitable[Response]]] = {"": of_model, "/versions/{version}": of_version}
        for path, endpoint in endpoints.items():
            router.add_api_route(
                f"/v2/models/{{model}}{path}/infer",
                endpoint,
                methods=["POST"],
                name="infer",
                summary="Classify images: pixels, or files.",
                response_class=Response,
                responses={**_ANSWER_DOCUMENTATION, **error_documentation(_INFER_ERRORS)},
                openapi_extra={"requestBody": _body_documentation(self.signature)},
            )
        return router


_INFER_ERRORS = (400, 404, 408, 413, 415, 422, 429, 500, 503, 504)
_ANSWER_DOCUMENTATION: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The outputs: JSON, or JSON followed by binary data.",
        "headers": HEADER_DOCUMENTATION
        | {HEADER_LENGTH: {"description": "Length of the JSON, where data follows.", "schema": {"type": "integer"}}},
        "content": {"application/json": {"schema": {"type": "object"}}, "application/octet-stream": {}},
    }
}


def _body_documentation(signature: Signature) -> dict[str, Any]:
    image = {"name": INPUT, "datatype": "BYTES", "shape": [1], "data": [_grey_square()]}
    inputs = {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {
            "name": {"const": INPUT},
            "datatype": {"enum": ["UINT8", "FP32", "BYTES"]},
            "shape": {
                "type": "array",
                "items": {"type": "integer", "minimum": 1},
                "description": f"[N, {', '.join(map(str, signature.image_shape))}], or [N] for BYTES; "
                f"N up to {signature.max_images}.",
            },
            "data": {"type": "array"},
            "parameters": {"type": "object"},
        },
    }
    schema = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "inputs": {"type": "array", "minItems": 1, "maxItems": 1, "items": inputs},
            "outputs": {"type": "array", "maxItems": 1},
            "parameters": {"type": "object"},
        },
    }
    json_body = {"schema": schema, "example": {"inputs": [image]}}
    return {"required": True, "content": {"application/json": json_body, "application/octet-stream": {}}}


def _grey_square() -> str:
    """An image file as base64, so that the example can be tried out."""
    file = BytesIO()
    Image.new("L", (MIN_SIDE, MIN_SIDE), 128).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
