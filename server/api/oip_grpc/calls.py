"""One gRPC call, from its first byte to its status: record, authorization, deadline, message, errors.

Calls are observed as HTTP requests are: `status` in the log and `code` in the metrics are the HTTP status of the same outcome.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from starlette.types import Scope

from multiworld_serving.server.auth.authorizer import Authorizer, http_port_permission
from multiworld_serving.server.errors import BodyTimeoutError, BodyTooLargeError, DeadlineError, RequestRejected
from multiworld_serving.server.http.errors import INTERNAL_ERROR
from multiworld_serving.server.http.limits import RequestLimits
from multiworld_serving.server.observability.requests import InferenceProtocol, RequestRecord, Requests
from multiworld_serving.server.predictor import Pipeline

logger = logging.getLogger(__name__)

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


class Call:
    """One call.

    Attributes:
        timeout_s: that of the client, or of the server if it is shorter.
        trailers: metadata at the end of an answer.
    """

    def __init__(self, context: Any, record: RequestRecord, handler: CallHandler) -> None:
        self.record = record
        self.trailers: dict[str, str] = {}
        self._context = context
        self._handler = handler
        left_s, limit_s = context.time_remaining(), handler.limits.timeout_s
        self.timeout_s: float = limit_s if left_s is None else min(limit_s, left_s)

    @property
    def late(self) -> bool:
        """Whether its deadline has passed."""
        return time.monotonic() >= self.record.started_s + self.timeout_s

    async def message(self) -> bytes:
        """Receive the message of the request.

        Raises:
            BodyTimeoutError: it did not arrive before the deadline.
            BodyTooLargeError: gRPC has refused it.
        """
        try:
            async with asyncio.timeout(self.timeout_s), self._handler.receiving:
                message = await self._context.read()
        except TimeoutError as error:
            raise BodyTimeoutError("the message was not received before the call timed out; send it faster") from error
        if message is grpc.aio.EOF:
            raise BodyTooLargeError(
                f"there is no message, or it is larger than the limit of {self._handler.limits.max_body_bytes} bytes; send a smaller one"
            )
        received: bytes = message
        return received


Answer = Callable[[Call], Awaitable[bytes]]
"""Answers a call that is authorized. Raises RequestRejected."""


class CallHandler:
    """Runs calls.

    Attributes:
        receiving: calls that receive a message at the same time: the memory for the largest messages is reserved for them.
    """

    def __init__(self, pipeline: Pipeline, requests: Requests, authorizer: Authorizer, limits: RequestLimits) -> None:
        self._pipeline = pipeline
        self._requests = requests
        self._authorizer = authorizer
        self.limits = limits
        self.receiving = asyncio.Semaphore(max(1, limits.max_held_bytes // limits.max_body_bytes))

    def handler(
        self, path: str, equivalent: str, answer: Answer, protocol: InferenceProtocol | None
    ) -> grpc.RpcMethodHandler:
        """The handler of a method. To the client it is a unary method; as a stream, the server chooses when to receive the message.

        Args:
            path: of the method.
            equivalent: path of the same method over HTTP, for its permission.
            protocol: see `Requests.begin`.
        """
        permission = http_port_permission(equivalent)

        async def run(_: object, context: Any) -> bytes:
            scope = _scope(path, context)
            record = self._requests.begin(scope, self._pipeline.version.name, protocol)
            call = Call(context, record, self)
            try:
                record.key_name = self._authorizer.check(permission, scope)
                message = await answer(call)
                record.status = 200
            except RequestRejected as rejection:
                record.status, record.reason = rejection.status, rejection.reason
                detail, retry_s = rejection.detail, rejection.retry_after_s
            except asyncio.CancelledError:
                if call.late:  # gRPC has cancelled the call, and not the client
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


def _scope(path: str, context: Any) -> Scope:
    """The call as an ASGI scope, for what observes and authorizes HTTP requests."""
    headers = [
        (name.encode("ascii"), value if isinstance(value, bytes) else value.encode("latin-1", "replace"))
        for name, value in context.invocation_metadata() or ()
    ]
    return {"type": "http", "method": "POST", "path": path, "headers": headers, "client": None}
