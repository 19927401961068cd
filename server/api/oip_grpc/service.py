"""The methods of the service. Each one answers as its path over HTTP does, and is recorded and authorized as that.

`status` in the log and `code` in the metrics are the HTTP status of the same outcome.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from starlette.types import Scope

from multiworld_serving.server.api.inference import Inference, InferRequest, encoded, prediction_headers
from multiworld_serving.server.api.oip.metadata import repository_index
from multiworld_serving.server.api.oip.routes import server_metadata
from multiworld_serving.server.api.oip_grpc.codec import METHODS, SERVICE, decode, infer_message, parse_infer_message
from multiworld_serving.server.auth.authorizer import Authorizer, http_port_permission
from multiworld_serving.server.errors import BodyTimeoutError, BodyTooLargeError, DeadlineError, RequestRejected
from multiworld_serving.server.http.errors import INTERNAL_ERROR
from multiworld_serving.server.http.open_request import OpenRequest
from multiworld_serving.server.observability.requests import InferenceProtocol, RequestRecord, Requests
from multiworld_serving.server.predictor import Pipeline, Prediction

logger = logging.getLogger(__name__)

_EXTENSIONS = ["classification", "model_repository(index)"]

STATUS_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""The gRPC status of each HTTP status. The only place that maps them."""


@dataclass
class _Call:
    """One call.

    Attributes:
        timeout_s: that of the client, or of the server if it is shorter.
        trailers: metadata at the end of an answer.
    """

    context: Any
    record: RequestRecord
    timeout_s: float
    trailers: dict[str, str] = field(default_factory=dict)


Answer = Callable[[_Call], Awaitable[bytes]]
"""Answers a call that is authorized. Raises RequestRejected."""


class InferenceService:
    """Implements `inference.GRPCInferenceService`."""

    def __init__(self, pipeline: Pipeline, inference: Inference, requests: Requests, authorizer: Authorizer) -> None:
        self._pipeline = pipeline
        self._inference = inference
        self._signature = inference.signature
        self._requests = requests
        self._authorizer = authorizer
        self._limits = limits = inference.gate.limits
        # Calls that receive a message at the same time: the memory for the largest messages is reserved for them.
        self._receiving = asyncio.Semaphore(max(1, limits.max_held_bytes // limits.max_body_bytes))

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        """The handlers of all methods, by name."""
        model = f"/v2/models/{self._signature.model.name}"
        plain: dict[str, tuple[str, Callable[[Any], Mapping[str, Any]]]] = {
            "ServerLive": ("/v2/health/live", lambda _: {"live": True}),
            "ServerReady": ("/v2/health/ready", lambda _: {"ready": self._pipeline.ready}),
            "ModelReady": (f"{model}/ready", self._model_ready),
            "ServerMetadata": ("/v2", lambda _: server_metadata(_EXTENSIONS)),
            "ModelMetadata": (model, self._model_metadata),
            "RepositoryIndex": ("/v2/repository/index", self._index),
        }
        found = {name: self._handler(name, path, self._plain(name, respond)) for name, (path, respond) in plain.items()}
        found["ModelInfer"] = self._handler("ModelInfer", f"{model}/infer", self._infer, "grpc")
        return found

    def _handler(
        self, name: str, equivalent: str, answer: Answer, protocol: InferenceProtocol | None = None
    ) -> grpc.RpcMethodHandler:
        """The handler of a method. To the client it is a unary method; as a stream, the server chooses when to receive the message.

        Args:
            equivalent: path of the same method over HTTP, for its permission.
            protocol: see `Requests.begin`.
        """
        path, permission = f"/{SERVICE}/{name}", http_port_permission(equivalent)

        async def run(_: object, context: Any) -> bytes:
            scope = _scope(path, context)
            record = self._requests.begin(scope, self._pipeline.version.name, protocol)
            left_s, limit_s = context.time_remaining(), self._limits.timeout_s
            call = _Call(context, record, limit_s if left_s is None else min(limit_s, left_s))
            try:
                record.key_name = self._authorizer.check(permission, scope)
                message = await answer(call)
                record.status = 200
            except RequestRejected as rejection:
                record.status, record.reason = rejection.status, rejection.reason
                detail, retry_s = rejection.detail, rejection.retry_after_s
            except asyncio.CancelledError:
                if (
                    time.monotonic() >= record.started_s + call.timeout_s
                ):  # gRPC has cancelled the call, and not the client
                    record.status, record.reason = DeadlineError.status, DeadlineError.reason
                raise
            except Exception:
                record.status, record.reason, detail, retry_s = 500, "internal", INTERNAL_ERROR, None
                logger.exception("request failed request_id=%s path=%s", record.request_id, path)
            finally:
                self._requests.end(scope, record)
            trailers = {"x-request-id": record.request_id}
            if record.status == 200:
                context.set_trailing_metadata(tuple((trailers | call.trailers).items()))
                return message
            trailers["reason"] = record.reason
            if retry_s is not None:
                trailers["grpc-retry-pushback-ms"] = str(round(retry_s * 1e3))
            await context.abort(STATUS_CODES[record.status], detail, tuple(trailers.items()))
            raise AssertionError("abort raises")

        return grpc.stream_unary_rpc_method_handler(run)

    async def _receive(self, call: _Call) -> bytes:
        """Receive the message of the request.

        Raises:
            BodyTimeoutError: it did not arrive before the deadline.
            BodyTooLargeError: gRPC has refused it.
        """
        try:
            async with asyncio.timeout(call.timeout_s), self._receiving:
                message = await call.context.read()
        except TimeoutError as error:
            raise BodyTimeoutError("the message was not received before the call timed out; send it faster") from error
        if message is grpc.aio.EOF:
            raise BodyTooLargeError(
                f"there is no message, or it is larger than the limit of {self._limits.max_body_bytes} bytes; send a smaller one"
            )
        received: bytes = message
        return received

    async def _infer(self, call: _Call) -> bytes:
        inference, signature = self._inference, self._signature
        opened = OpenRequest(inference.gate, call.record, None, call.timeout_s)

        async def receive() -> bytes:
            body = await self._receive(call)
            opened.received()
            opened.hold(len(body))
            return body

        async def parse(body: bytes) -> InferRequest:
            return await inference.threads.run(partial(parse_infer_message, body, signature, self._pipeline.version))

        async def encode(prediction: Prediction, asked: InferRequest) -> bytes:
            call.trailers = {name.lower(): value for name, value in prediction_headers(prediction).items()}
            return await encoded(partial(infer_message, prediction, asked, signature=signature), prediction)

        return await inference.answer(opened, receive, parse, encode)

    def _plain(self, name: str, respond: Callable[[Any], Mapping[str, Any]]) -> Answer:
        """The answer of a method that costs nothing."""
        method = METHODS[name]

        async def answer(call: _Call) -> bytes:
            request = decode(method.request, await self._receive(call))
            response: bytes = method.response(**respond(request)).SerializeToString()
            return response

        return answer

    def _model_ready(self, request: Any) -> Mapping[str, Any]:
        self._check(request)
        return {"ready": self._pipeline.ready}

    def _model_metadata(self, request: Any) -> Mapping[str, Any]:
        self._check(request)
        metadata = self._signature.metadata(self._pipeline.version)
        return {name: metadata[name] for name in ("name", "versions", "platform", "inputs", "outputs")}

    def _index(self, request: Any) -> Mapping[str, Any]:
        return {"models": repository_index(self._pipeline.snapshot(), only_ready=request.ready)}

    def _check(self, request: Any) -> None:
        self._signature.check_served(request.name, request.version or None, self._pipeline.version)


def _scope(path: str, context: Any) -> Scope:
    """The call as an ASGI scope, for what observes and authorizes HTTP requests."""
    headers = [
        (name.encode("ascii"), value if isinstance(value, bytes) else value.encode("latin-1", "replace"))
        for name, value in context.invocation_metadata() or ()
    ]
    return {"type": "http", "method": "POST", "path": path, "headers": headers, "client": None}
