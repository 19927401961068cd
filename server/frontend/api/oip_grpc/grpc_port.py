"""The gRPC port of a frontend: its socket, TLS, the limits of its connections, its methods, and its end.

Each method answers as its path over HTTP does, and is recorded and authorized as that. `status` in the log and `code` in the metrics are
the HTTP status of the same outcome.

gRPC opens the socket itself, so frontends cannot inherit a listening one. They all listen at the same port (SO_REUSEPORT), and the kernel
gives each new connection to one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

import grpc
from starlette.types import Scope

from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.http.server import KEEP_ALIVE_S
from multiworld_serving.common.http.tls import TlsFiles
from multiworld_serving.common.service.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    DeadlineError,
    RequestRejected,
)
from multiworld_serving.server.frontend.api.groups import ModelGroup, ModelGroups
from multiworld_serving.server.frontend.api.inference import encoded, prediction_headers
from multiworld_serving.server.frontend.api.oip.routes import server_metadata
from multiworld_serving.server.frontend.api.oip_grpc.infer_messages import (
    METHODS,
    SERVICE,
    decode,
    infer_message,
    named_model,
    parse_infer_message,
)
from multiworld_serving.server.frontend.auth.authorizer import Authorizer, http_port_permission
from multiworld_serving.server.frontend.http.error_responses import INTERNAL_ERROR
from multiworld_serving.server.frontend.http.limits import RequestLimits
from multiworld_serving.server.frontend.observability.request_records import (
    InferenceProtocol,
    RequestRecord,
    RequestRecorder,
)

logger = logging.getLogger(__name__)

_MAX_AGE_S = 300.0
"""Age at which a connection is closed gracefully: the client opens another, perhaps to a frontend that has started meanwhile."""
_MAX_STREAMS = 1000
"""Calls of one connection at the same time; a client queues further ones."""
_STALL_MS = 10_000
"""Longest TLS handshake, interval of pings, and longest time without a reply to one."""
_TRANSIT_S = 0.05
"""A call that is cancelled this close to its deadline has reached it: the client's time began before the message arrived."""
_SLOW_S = 5.0
"""Time after which a call that is still receiving its message ends, if another one waits for its place."""
_SMALL_S = 2.0
"""Longest time for receiving a message that names a model or nothing."""
_MAX_METADATA_BYTES = 32 * 2**10
_ONLY_UNCOMPRESSED = 1
"""gRPC does not limit the size of a message after decompression."""

_EXTENSIONS = ["classification", "model_configuration", "model_repository(index)", "statistics"]

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

Answer = Callable[[Any, Scope, RequestRecord, float], Awaitable[tuple[bytes, Mapping[str, str]]]]
"""Answers a call that is authorized: its context, its scope, its record, and its timeout in seconds. Returns message and trailers.

Raises RequestRejected.
"""


class GrpcPort:
    """Serves the protocol while the `async with` block runs.

    Args:
        reserved: bound to host and port, with SO_REUSEPORT, and not listening.
        tls: None = no TLS.
    """

    def __init__(
        self,
        groups: ModelGroups,
        limits: RequestLimits,
        requests: RequestRecorder,
        authorizer: Authorizer,
        reserved: socket.socket,
        max_connections: int,
        tls: TlsFiles | None,
    ) -> None:
        self._groups = groups
        self._requests = requests
        self._authorizer = authorizer
        self._limits = limits
        # The memory for the largest messages is reserved for the calls that receive one.
        at_once = max(1, limits.max_held_bytes // limits.max_body_bytes)
        self._infer_places, self._places = _ReceivePlaces(at_once), _ReceivePlaces(at_once)
        self._max_connections = max_connections
        self._address = Address(*reserved.getsockname()[:2])
        self._tls = tls
        self._server: Any = None
        self._stopping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        handler = grpc.method_handlers_generic_handler(SERVICE, self._methods())
        options = _options(self._limits, self._max_connections)
        self._server = grpc.aio.server(
            handlers=[handler], options=options, maximum_concurrent_rpcs=self._max_connections
        )
        address = str(self._address)
        try:
            if self._tls is None:
                self._server.add_insecure_port(address)
            else:
                needs_client = self._tls.client_ca is not None
                credentials = grpc.dynamic_ssl_server_credentials(self._tls_now(), self._tls_now, needs_client)
                self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise UserError(f"cannot serve gRPC on {address}: {error}; choose another --grpc-port or --host") from error
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(0.0)
        assert self._stopping is not None
        await self._stopping

    def stop(self, grace_s: float) -> None:
        """Accept no more calls; end those in flight after `grace_s`. The block then waits for them. Only the first call counts."""
        self._stopping = self._stopping or asyncio.create_task(self._server.stop(grace_s))

    def reload_tls(self, tls: TlsFiles | None) -> None:
        """Use these files for new connections. A port with TLS gets some, and only such a port."""
        self._tls = tls

    def _tls_now(self) -> grpc.ServerCertificateConfiguration:
        """The files of now. Called by a thread of gRPC for each handshake."""
        assert self._tls is not None
        return grpc.ssl_server_certificate_configuration([(self._tls.key, self._tls.chain)], self._tls.client_ca)

    def _methods(self) -> dict[str, grpc.RpcMethodHandler]:
        """The handlers of all methods, by name."""
        model, index = "/v2/models/MODEL", self._groups.index
        plain: dict[str, tuple[str, Callable[[Any], Mapping[str, Any]]]] = {
            "ServerLive": ("/v2/health/live", lambda _: {"live": True}),
            "ServerReady": ("/v2/health/ready", lambda _: {"ready": self._groups.not_ready is None}),
            "ServerMetadata": ("/v2", lambda _: server_metadata(_EXTENSIONS)),
            "ModelReady": (f"{model}/ready", lambda asked: {"ready": self._group(asked).pool.ready}),
            "ModelMetadata": (model, self._model_metadata),
            "ModelConfig": (f"{model}/config", self._model_config),
            "ModelStatistics": (f"{model}/stats", self._model_statistics),
            "RepositoryIndex": (
                "/v2/repository/index",
                lambda asked: {"models": index(only_ready=asked.ready, shares=False)},
            ),
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
            protocol: see `RequestRecorder.begin`.
        """
        path, permission = f"/{SERVICE}/{name}", http_port_permission(equivalent)

        async def run(_: object, context: Any) -> bytes:
            scope = _scope(path, context)
            record = self._requests.begin(scope, "", protocol)
            if (only := self._groups.only) is not None:
                record.counts, record.version = only.requests, only.pool.version.name
            left_s, limit_s = context.time_remaining(), self._limits.timeout_s
            timeout_s = limit_s if left_s is None else min(limit_s, left_s)
            try:
                record.key_name, record.key_models = self._authorizer.check(permission, scope)
                message, trailers = await answer(context, scope, record, timeout_s)
                record.status = 200
            except RequestRejected as rejection:
                record.status, record.reason = rejection.status, rejection.reason
                detail, retry_s = rejection.detail, rejection.retry_after_s
            except asyncio.CancelledError:
                # The deadline has ended the call, here or at the client, whose clock started earlier.
                if time.monotonic() >= record.started_s + timeout_s - _TRANSIT_S:
                    record.status, record.reason = DeadlineError.status, DeadlineError.reason
                raise
            except Exception:
                record.status, record.reason, detail, retry_s = 500, "internal", INTERNAL_ERROR, None
                logger.exception("request failed request_id=%s path=%s", record.request_id, path)
            finally:
                self._requests.end(scope, record)
            if record.status == 200:
                context.set_trailing_metadata((("x-request-id", record.request_id), *trailers.items()))
                return message
            trailers = {"x-request-id": record.request_id, "reason": record.reason}
            if retry_s is not None:
                trailers["grpc-retry-pushback-ms"] = str(round(retry_s * 1e3))
            await context.abort(STATUS_CODES[record.status], detail, tuple(trailers.items()))
            raise AssertionError("abort raises")

        return grpc.stream_unary_rpc_method_handler(run)

    async def _receive(self, context: Any, timeout_s: float, places: _ReceivePlaces) -> bytes:
        """Receive the message of the request.

        Raises:
            BodyTimeoutError: it did not arrive before the deadline.
            BodyTooLargeError: gRPC has refused it.
        """
        try:
            async with asyncio.timeout(timeout_s), places.take():
                message = await context.read()
        except TimeoutError as error:
            raise BodyTimeoutError("the message was not received before the call timed out; send it faster") from error
        if message is grpc.aio.EOF:
            limit = self._limits.max_body_bytes
            raise BodyTooLargeError(
                f"there is no message, or it is larger than the limit of {limit} bytes; send a smaller one"
            )
        received: bytes = message
        return received

    async def _infer(
        self, context: Any, scope: Scope, record: RequestRecord, timeout_s: float
    ) -> tuple[bytes, Mapping[str, str]]:
        received = await self._receive(context, timeout_s, self._infer_places)
        group = self._groups.only or self._groups.choose(record, scope, *named_model(received))
        inference, version = group.described(), group.version
        async with inference.open(record, timeout_s=timeout_s) as opened:
            opened.hold(len(received))
            await opened.admit()
            asked = await inference.threads.run(partial(parse_infer_message, received, inference.signature, version))
            del received
            prediction = await inference.predict(opened, asked)
            message = await encoded(prediction, partial(infer_message, prediction, asked, inference.signature))
        return message, {name.lower(): value for name, value in prediction_headers(prediction).items()}

    def _plain(self, name: str, respond: Callable[[Any], Mapping[str, Any]]) -> Answer:
        """The answer of a method that costs nothing. The message of a request without fields is not received: it would need a place."""
        method = METHODS[name]
        has_fields = bool(method.request.DESCRIPTOR.fields)

        async def answer(
            context: Any, _: Scope, record: RequestRecord, timeout_s: float
        ) -> tuple[bytes, Mapping[str, str]]:
            timeout_s = min(timeout_s, _SMALL_S)
            received = await self._receive(context, timeout_s, self._places) if has_fields else b""
            request = decode(method.request, received)
            return method.response(**respond(request)).SerializeToString(), {}

        return answer

    def _model_metadata(self, request: Any) -> Mapping[str, Any]:
        metadata = self._groups.metadata(self._group(request))
        return {name: metadata[name] for name in ("name", "versions", "platform", "inputs", "outputs")}

    def _model_config(self, request: Any) -> Mapping[str, Any]:
        group = self._group(request)
        return {"config": group.described().signature.config(group.version)}

    def _model_statistics(self, request: Any) -> Mapping[str, Any]:
        groups = [self._group(request)] if request.name else self._groups
        return {"model_stats": [group.statistics() for group in groups]}

    def _group(self, request: Any) -> ModelGroup:
        return self._groups.named(request.name, request.version or None)


class _ReceivePlaces:
    """Limits how many calls receive a message at the same time."""

    def __init__(self, places: int) -> None:
        self._free = asyncio.Semaphore(places)
        self._receiving: dict[asyncio.Timeout, float] = {}

    @contextlib.asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Hold a place while the block runs. Raises TimeoutError if it takes longer than `_SLOW_S` and another call waits."""
        now_s = asyncio.get_running_loop().time()
        if self._free.locked() and self._receiving:
            longest, began_s = next(iter(self._receiving.items()))
            del self._receiving[longest]
            longest.reschedule(max(now_s, began_s + _SLOW_S))
        async with self._free, asyncio.timeout(None) as limit:
            self._receiving[limit] = asyncio.get_running_loop().time()
            try:
                yield
            finally:
                self._receiving.pop(limit, None)


def _options(requests: RequestLimits, max_connections: int) -> list[tuple[str, int]]:
    """The options of gRPC for the limits of HTTP."""
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.compression_enabled_algorithms_bitset", _ONLY_UNCOMPRESSED),
        ("grpc.max_receive_message_length", requests.max_body_bytes),
        ("grpc.max_concurrent_streams", _MAX_STREAMS),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.server_handshake_timeout_ms", _STALL_MS),
        ("grpc.max_connection_idle_ms", _ms(KEEP_ALIVE_S)),
        ("grpc.max_connection_age_ms", _ms(_MAX_AGE_S)),
        # A client that does not read its answers keeps its connection no longer than this.
        ("grpc.max_connection_age_grace_ms", _ms(requests.timeout_s) + _STALL_MS),
        # The server pings clients with calls in flight: those of a client that is cut off are cancelled.
        ("grpc.keepalive_time_ms", _STALL_MS),
        ("grpc.keepalive_timeout_ms", _STALL_MS),
    ]


def _ms(seconds: float) -> int:
    return round(seconds * 1e3)


def _scope(path: str, context: Any) -> Scope:
    """The call as an ASGI scope, for what observes and authorizes HTTP requests."""
    headers = [
        (name.encode("ascii"), value if isinstance(value, bytes) else value.encode("latin-1", "replace"))
        for name, value in context.invocation_metadata() or ()
    ]
    return {"type": "http", "method": "POST", "path": path, "headers": headers, "client": None}
