"""The gRPC port of a frontend: its socket, TLS, the limits of its connections, and its end.

gRPC opens the socket itself, so frontends cannot inherit a listening one. They all listen at the same port (SO_REUSEPORT), and the kernel
gives each new connection to one of them.
"""

from __future__ import annotations

import asyncio
import socket
from types import TracebackType
from typing import Any, Self

import grpc

from multiworld_serving.common.config import UserError
from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.http.server import KEEP_ALIVE_S
from multiworld_serving.server.api.inference import Inference
from multiworld_serving.server.api.oip_grpc.codec import SERVICE
from multiworld_serving.server.api.oip_grpc.service import InferenceService
from multiworld_serving.server.auth.authorizer import Authorizer
from multiworld_serving.server.http.limits import RequestLimits
from multiworld_serving.server.http.tls import TlsFiles
from multiworld_serving.server.observability.requests import Requests
from multiworld_serving.server.predictor import Pipeline

_MAX_AGE_S = 300.0
"""Age at which a connection is closed gracefully: the client opens another, perhaps to a frontend that has started meanwhile."""
_MAX_STREAMS = 1000
"""Calls of one connection at the same time; a client queues further ones."""
_STALL_MS = 10_000
"""Longest TLS handshake, interval of pings, and longest time without a reply to one."""
_MAX_METADATA_BYTES = 32 * 2**10
_ONLY_UNCOMPRESSED = 1
"""gRPC does not limit the size of a message after decompression."""


class GrpcPort:
    """Serves the protocol while the `async with` block runs.

    Args:
        reserved: bound to host and port, with SO_REUSEPORT, and not listening.
        tls: None = no TLS.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        inference: Inference,
        requests: Requests,
        authorizer: Authorizer,
        reserved: socket.socket,
        max_connections: int,
        tls: TlsFiles | None,
    ) -> None:
        methods = InferenceService(pipeline, inference, requests, authorizer).handlers()
        self._handlers = grpc.method_handlers_generic_handler(SERVICE, methods)
        self._options = _options(inference.gate.limits, max_connections)
        self._max_calls = max_connections
        self._address = Address(*reserved.getsockname()[:2])
        self._tls = tls
        self._server: Any = None
        self._stopping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(
            handlers=[self._handlers], options=self._options, maximum_concurrent_rpcs=self._max_calls
        )
        address = str(self._address)
        try:
            if self._tls is None:
                self._server.add_insecure_port(address)
            else:
                self._server.add_secure_port(address, self._credentials(self._tls))
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

    def _credentials(self, tls: TlsFiles) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            _configuration(tls), self._current_configuration, tls.client_ca is not None
        )

    def _current_configuration(self) -> grpc.ServerCertificateConfiguration:
        """Called by a thread of gRPC for each handshake."""
        assert self._tls is not None
        return _configuration(self._tls)


def _configuration(tls: TlsFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(tls.key, tls.chain)], tls.client_ca)


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
