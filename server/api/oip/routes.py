"""The routes of the Open Inference Protocol, version 2, over HTTP, with Triton's statistics and configuration extensions."""

from __future__ import annotations

import base64
import importlib.metadata
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from typing import Any

from fastapi import APIRouter, Depends, Path
from fastapi.responses import Response
from PIL import Image
from starlette.requests import Request
from starlette.routing import BaseRoute

from multiworld_serving.server.api.images import MIN_SIDE
from multiworld_serving.server.api.inference import (
    HEADER_DOCUMENTATION,
    Inference,
    InferRequest,
    encoded,
    prediction_headers,
)
from multiworld_serving.server.api.oip.compression import accepted_encoding, content_encoding, pack, unpack
from multiworld_serving.server.api.oip.infer_request import parse_infer_request
from multiworld_serving.server.api.oip.infer_response import HEADER_LENGTH, build_response
from multiworld_serving.server.api.oip.metadata import Signature, repository_index
from multiworld_serving.server.errors import InferenceRequestError
from multiworld_serving.server.http.errors import error_documentation
from multiworld_serving.server.http.inference_route import (
    Seconds,
    inference_router,
    refuse_unknown_parameters,
    timeout_parameter,
)
from multiworld_serving.server.http.open_request import OpenRequest
from multiworld_serving.server.observability.requests import RequestRecord, Requests
from multiworld_serving.server.predictor import Pipeline, Prediction
from multiworld_serving.server.readiness import readiness_error

_TAG = "open inference protocol"
_EXTENSIONS = ["binary_tensor_data", "classification", "model_configuration", "statistics"]

Handler = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class V2Routes:
    """The routes under /v2."""

    predictor: Pipeline
    inference: Inference
    requests: Requests

    def routes(self) -> list[BaseRoute]:
        """The routes, documented for OpenAPI."""
        return [*self._infer_router().routes, *self._router().routes]

    def _router(self) -> APIRouter:
        router = APIRouter(tags=[_TAG], dependencies=[Depends(refuse_unknown_parameters)])
        not_ready = error_documentation((503,))
        router.add_api_route("/v2", self.server, response_model=dict[str, Any])
        router.add_api_route("/v2/health/live", self.live, response_model=dict[str, bool])
        router.add_api_route("/v2/health/ready", self.ready, response_model=dict[str, bool], responses=not_ready)
        router.add_api_route("/v2/models/stats", self.all_statistics, response_model=dict[str, Any])
        router.add_api_route("/v2/repository/index", self.index, methods=["POST"], response_model=list[dict[str, str]])
        self._add_model_route(router, "", self._metadata, "The model's inputs and outputs.")
        self._add_model_route(router, "/config", self._config, "The model's configuration in Triton's format.")
        self._add_model_route(router, "/stats", self._statistics, "Statistics of inference since the start.")
        self._add_model_route(router, "/ready", self._model_ready, "Readiness of the model.", not_ready)
        return router

    async def server(self) -> dict[str, Any]:
        """The server's name, version and protocol extensions."""
        version = importlib.metadata.version("multiworld-serving")
        return {"name": "multiworld-serving", "version": version, "extensions": _EXTENSIONS}

    async def live(self) -> dict[str, bool]:
        """Liveness of the process."""
        return {"live": True}

    async def ready(self) -> dict[str, bool]:
        """Readiness of the service."""
        self._check_ready()
        return {"ready": True}

    async def all_statistics(self) -> dict[str, Any]:
        """Statistics of inference since the start."""
        return self._statistics()

    async def index(self) -> list[dict[str, str]]:
        """The versions of the model and their state."""
        return repository_index(self.predictor.snapshot())

    def _add_model_route(
        self,
        router: APIRouter,
        suffix: str,
        handler: Handler,
        summary: str,
        errors: dict[int | str, dict[str, Any]] | None = None,
    ) -> None:
        model_parameter, version_parameter = self._path_parameters()

        async def of_model(model: str = model_parameter) -> dict[str, Any]:
            self._check(model)
            return handler()

        async def of_version(model: str = model_parameter, version: str = version_parameter) -> dict[str, Any]:
            self._check(model, version)
            return handler()

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

    def _path_parameters(self) -> tuple[Any, Any]:
        """The path parameters for name and version, documented with their only valid values."""
        served = self.inference.signature.model.name
        name = Path(description="The served model's name.", json_schema_extra={"enum": [served]})
        now = str(self.predictor.version.number)
        says = "Number of the current version. This document shows the version that was current when the document was created."
        version = Path(description=says, json_schema_extra={"enum": [now]})
        return name, version

    def _check(self, model: str, version: str | None = None) -> None:
        self.inference.signature.check_served(model, version, self.predictor.version)

    def _check_ready(self) -> None:
        if not self.predictor.ready:
            raise readiness_error(self.predictor.snapshot())

    def _metadata(self) -> dict[str, Any]:
        return self.inference.signature.metadata(self.predictor.version)

    def _config(self) -> dict[str, Any]:
        return self.inference.signature.config(self.predictor.version)

    def _model_ready(self) -> dict[str, Any]:
        self._check_ready()
        return {"name": self.inference.signature.model.name, "ready": True}

    def _statistics(self) -> dict[str, Any]:
        return {"model_stats": [self.requests.statistics(str(self.predictor.version.number))]}

    def _infer_router(self) -> APIRouter:
        router = inference_router(_TAG)
        timeout_header = timeout_parameter(self.inference.gate.limits.timeout_s)
        model_parameter, version_parameter = self._path_parameters()

        async def of_model(
            request: Request, model: str = model_parameter, timeout_s: Seconds = timeout_header
        ) -> Response:
            self._check(model)
            return await infer(self.inference, request, timeout_s)

        async def of_version(
            request: Request,
            model: str = model_parameter,
            version: str = version_parameter,
            timeout_s: Seconds = timeout_header,
        ) -> Response:
            self._check(model, version)
            return await infer(self.inference, request, timeout_s, version=int(version))

        endpoints: dict[str, Callable[..., Awaitable[Response]]] = {"": of_model, "/versions/{version}": of_version}
        for path, endpoint in endpoints.items():
            router.add_api_route(
                f"/v2/models/{{model}}{path}/infer",
                endpoint,
                methods=["POST"],
                name="infer",
                summary="Compute the outputs of one or more samples.",
                response_class=Response,
                responses={**_RESPONSE_DOCUMENTATION, **error_documentation(_INFER_ERRORS)},
                openapi_extra={"requestBody": _body_documentation(self.inference.signature)},
            )
        return router


async def infer(
    inference: Inference, request: Request, timeout_s: float | None, version: int | None = None
) -> Response:
    """Compute one or more samples of a request whose model and version were checked.

    Args:
        timeout_s: the client's timeout from the request header.
        version: number of the version that the client requires; None = any.
    Raises:
        RequestRejected: at least one sample was rejected, and so the whole request is.
    """
    headers, signature, record = request.headers, inference.signature, RequestRecord.of(request.scope)
    encoding, json_bytes = content_encoding(headers.get("content-encoding")), _json_bytes(headers.get(HEADER_LENGTH))
    accepted = accepted_encoding(headers.get("accept-encoding"))

    opened = OpenRequest(inference.gate, record, request.receive, timeout_s)

    def parsed(body: bytes) -> InferRequest:
        plain = body if encoding is None else unpack(body, encoding, inference.gate.limits.max_body_bytes)
        return replace(parse_infer_request(plain, json_bytes, signature), version=version)

    async def parse(body: bytes) -> InferRequest:
        return await inference.threads.run(partial(parsed, body))

    def response(prediction: Prediction, asked: InferRequest) -> Response:
        body, binary_at = build_response(prediction, asked.outputs, asked.id, signature)
        answer = prediction_headers(prediction) | {"Vary": "Accept-Encoding"}
        if binary_at is not None:
            answer[HEADER_LENGTH] = str(binary_at)
        if accepted is not None:
            body, answer["Content-Encoding"] = pack(body, accepted), accepted
        media_type = "application/json" if binary_at is None else "application/octet-stream"
        return Response(body, media_type=media_type, headers=answer)

    async def encode(prediction: Prediction, asked: InferRequest) -> Response:
        return await encoded(partial(response, prediction, asked), prediction)

    return await inference.answer(opened, partial(opened.body, headers, allow_empty=True), parse, encode)


def _json_bytes(given: str | None) -> int | None:
    if given is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", given):
        raise InferenceRequestError(f"{HEADER_LENGTH} is {given[:64]!r}; expected a number of bytes")
    return int(given)


_INFER_ERRORS = (400, 404, 408, 413, 415, 422, 429, 500, 503, 504)
_RESPONSE_DOCUMENTATION: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The outputs: JSON, or JSON followed by binary data.",
        "headers": HEADER_DOCUMENTATION
        | {HEADER_LENGTH: {"description": "Length of the JSON if binary data follows.", "schema": {"type": "integer"}}},
        "content": {"application/json": {"schema": {"type": "object"}}, "application/octet-stream": {}},
    }
}


def _body_documentation(signature: Signature) -> dict[str, Any]:
    names = [each.name for each in signature.model.inputs]
    described = {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {"name": {"enum": names}, "shape": {"type": "array", "items": {"type": "integer"}}},
        "description": f"As GET /v2/models/{signature.model.name} describes it, with up to {signature.max_rows} samples.",
    }
    inputs = {"type": "array", "minItems": len(names), "maxItems": len(names), "items": described}
    schema = {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "inputs": inputs,
            "outputs": {"type": "array"},
            "parameters": {"type": "object"},
        },
    }
    json_body: dict[str, Any] = {"schema": schema}
    if signature.model.image is not None:
        file = BytesIO()
        Image.new("L", (MIN_SIDE, MIN_SIDE), 128).save(file, "PNG")
        data = [base64.b64encode(file.getvalue()).decode()]
        json_body["example"] = {"inputs": [{"name": names[0], "datatype": "BYTES", "shape": [1], "data": data}]}
    return {"required": True, "content": {"application/json": json_body, "application/octet-stream": {}}}
