"""The methods of the service. Each one answers as its path over HTTP does."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from multiworld_serving.server.api.inference import Inference, InferRequest, encoded, prediction_headers
from multiworld_serving.server.api.oip.metadata import repository_index
from multiworld_serving.server.api.oip_grpc.calls import Answer, Call, CallHandler
from multiworld_serving.server.api.oip_grpc.codec import METHODS, SERVICE, decode, infer_message, parse_infer_message
from multiworld_serving.server.http.open_request import OpenRequest
from multiworld_serving.server.predictor import Pipeline, Prediction

_EXTENSIONS = ["classification", "model_repository(index)"]


@dataclass(frozen=True)
class InferenceService:
    """Implements `inference.GRPCInferenceService`."""

    pipeline: Pipeline
    inference: Inference

    def handlers(self, calls: CallHandler) -> dict[str, grpc.RpcMethodHandler]:
        """The handlers of all methods, by name."""
        model = f"/v2/models/{self.inference.signature.model.name}"
        plain: dict[str, tuple[str, Callable[[Any], Mapping[str, Any]]]] = {
            "ServerLive": ("/v2/health/live", lambda _: {"live": True}),
            "ServerReady": ("/v2/health/ready", lambda _: {"ready": self.pipeline.ready}),
            "ModelReady": (f"{model}/ready", self._model_ready),
            "ServerMetadata": ("/v2", lambda _: _server()),
            "ModelMetadata": (model, self._model_metadata),
            "RepositoryIndex": ("/v2/repository/index", self._index),
        }
        found = {
            name: calls.handler(f"/{SERVICE}/{name}", path, _plain(name, respond), None)
            for name, (path, respond) in plain.items()
        }
        found["ModelInfer"] = calls.handler(f"/{SERVICE}/ModelInfer", f"{model}/infer", self._infer, "grpc")
        return found

    async def _infer(self, call: Call) -> bytes:
        inference, signature = self.inference, self.inference.signature
        opened = OpenRequest(inference.gate, call.record, None, call.timeout_s)

        async def receive() -> bytes:
            body = await call.message()
            opened.received()
            opened.hold(len(body))
            return body

        async def parse(body: bytes) -> InferRequest:
            return await inference.threads.run(partial(parse_infer_message, body, signature, self.pipeline.version))

        async def encode(prediction: Prediction, asked: InferRequest) -> bytes:
            call.trailers = {name.lower(): value for name, value in prediction_headers(prediction).items()}
            return await encoded(partial(infer_message, prediction, asked, signature=signature), prediction)

        return await inference.answer(opened, receive, parse, encode)

    def _model_ready(self, request: Any) -> Mapping[str, Any]:
        self._check(request)
        return {"ready": self.pipeline.ready}

    def _model_metadata(self, request: Any) -> Mapping[str, Any]:
        self._check(request)
        metadata = self.inference.signature.metadata(self.pipeline.version)
        return {name: metadata[name] for name in ("name", "versions", "platform", "inputs", "outputs")}

    def _index(self, request: Any) -> Mapping[str, Any]:
        return {"models": repository_index(self.pipeline.snapshot(), only_ready=request.ready)}

    def _check(self, request: Any) -> None:
        self.inference.signature.check_served(request.name, request.version or None, self.pipeline.version)


def _plain(name: str, respond: Callable[[Any], Mapping[str, Any]]) -> Answer:
    """The answer of a method that costs nothing."""
    method = METHODS[name]

    async def answer(call: Call) -> bytes:
        response: bytes = method.response(**respond(decode(method.request, await call.message()))).SerializeToString()
        return response

    return answer


def _server() -> dict[str, Any]:
    version = importlib.metadata.version("multiworld-serving")
    return {"name": "multiworld-serving", "version": version, "extensions": _EXTENSIONS}
