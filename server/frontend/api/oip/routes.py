"""The routes of the Open Inference Protocol, version 2, over HTTP, with Triton's statistics and configuration extensions."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from multiworld_serving.common.service.errors import InferenceRequestError
from multiworld_serving.common.service.predictor import Prediction
from multiworld_serving.server.frontend.api.groups import ModelGroup, ModelGroups
from multiworld_serving.server.frontend.api.inference import Inference, InferRequest, encoded, prediction_headers
from multiworld_serving.server.frontend.api.oip.compression import accepted_encoding, content_encoding, pack, unpack
from multiworld_serving.server.frontend.api.oip.infer_request import parse_infer_request
from multiworld_serving.server.frontend.api.oip.infer_response import HEADER_LENGTH, build_response
from multiworld_serving.server.frontend.api.oip.metadata import Signature, readiness_error
from multiworld_serving.server.frontend.http.route import Endpoint, route
from multiworld_serving.server.frontend.leaders.pool import LeaderPool
from multiworld_serving.server.frontend.observability.request_records import RequestRecord

_EXTENSIONS = ["binary_tensor_data", "classification", "model_configuration", "statistics"]


@dataclass(frozen=True)
class V2Routes:
    """The routes under /v2. They ignore query parameters, as Triton does."""

    groups: ModelGroups

    def routes(self) -> list[Route]:
        """The routes."""
        of_model: dict[str, Callable[[ModelGroup], object]] = {
            "": self.groups.metadata,
            "/config": lambda group: group.described().signature.config(group.version),
            "/stats": lambda group: {"model_stats": [group.statistics()]},
            "/ready": lambda group: {"name": group.model} | _ready(group.pool),
        }
        models = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
        return [
            *(route(f"{model}/infer", self.infer, "POST") for model in models),
            route("/v2", _json_endpoint(lambda: server_metadata(_EXTENSIONS))),
            route("/v2/health/live", _json_endpoint(lambda: {"live": True})),
            route("/v2/health/ready", _json_endpoint(self._health)),
            route("/v2/models", _json_endpoint(lambda: {"models": self.groups.names})),
            route(
                "/v2/models/stats",
                _json_endpoint(lambda: {"model_stats": [group.statistics() for group in self.groups]}),
            ),
            route("/v2/repository/index", _json_endpoint(self.groups.index), "POST"),
            *(route(f"{model}{path}", self._of_model(find)) for model in models for path, find in of_model.items()),
        ]

    def _of_model(self, find: Callable[[ModelGroup], object]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return JSONResponse(find(self.groups.named(**request.path_params)))

        return endpoint

    def _health(self) -> dict[str, Any]:
        waiting = self.groups.not_ready
        return {"ready": True} if waiting is None else _ready(waiting.pool)

    async def infer(self, request: Request) -> Response:
        """Compute one or more samples. If one of them is rejected, the whole request is."""
        group = self.groups.choose(RequestRecord.of(request.scope), request.scope, **request.path_params)
        inference = group.described()
        headers, version = request.headers, request.path_params.get("version")
        encoding = content_encoding(headers.get("content-encoding"))
        json_bytes = _json_bytes(headers.get(HEADER_LENGTH))
        accepted = accepted_encoding(headers.get("accept-encoding"))
        async with inference.open_http(request) as opened:
            body = await opened.body(request, allow_empty=True)
            await opened.admit()
            asked = await inference.threads.run(partial(_parse, body, encoding, json_bytes, inference))
            del body
            asked.version = None if version is None else int(version)
            prediction = await inference.predict(opened, asked)
            return await encoded(prediction, partial(_response, prediction, asked, inference.signature, accepted))


def _parse(body: bytes, encoding: str | None, json_bytes: int | None, inference: Inference) -> InferRequest:
    if encoding is not None:
        body = unpack(body, encoding, inference.gate.limits.max_body_bytes)
    return parse_infer_request(body, json_bytes, inference.signature)


def _response(prediction: Prediction, asked: InferRequest, signature: Signature, accepted: str | None) -> Response:
    body, binary_at = build_response(prediction, asked.outputs, asked.id, signature)
    headers = prediction_headers(prediction) | {"Vary": "Accept-Encoding"}
    if binary_at is not None:
        headers[HEADER_LENGTH] = str(binary_at)
    if accepted is not None:
        body, headers["Content-Encoding"] = pack(body, accepted), accepted
    media_type = "application/json" if binary_at is None else "application/octet-stream"
    return Response(body, media_type=media_type, headers=headers)


def server_metadata(extensions: Sequence[str]) -> dict[str, Any]:
    """The server's name, version and protocol extensions."""
    version = importlib.metadata.version("multiworld-serving")
    return {"name": "multiworld-serving", "version": version, "extensions": extensions}


def _ready(pool: LeaderPool) -> dict[str, Any]:
    if not pool.ready:
        raise readiness_error(pool.snapshot())
    return {"ready": True}


def _json_endpoint(find: Callable[[], object]) -> Endpoint:
    """Responds with what `find` returns."""

    async def endpoint(request: Request) -> Response:
        return JSONResponse(find())

    return endpoint


def _json_bytes(given: str | None) -> int | None:
    if given is None:
        return None
    if not re.fullmatch(r"[0-9]{1,18}", given):
        raise InferenceRequestError(f"{HEADER_LENGTH} is {given[:64]!r}; expected a number of bytes")
    return int(given)
