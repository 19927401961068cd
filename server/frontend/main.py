"""The entry point of a frontend: HTTP API, gRPC port and admin port, with links to all leaders."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import time
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
import uvloop

from multiworld_serving.common.config.addresses import local_host
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.config.process import first_of, notify_systemd, on_stop_signal, raise_descriptor_limit
from multiworld_serving.common.config.sources import option
from multiworld_serving.common.edges.edges import Edges
from multiworld_serving.common.edges.metrics import EdgeMetrics
from multiworld_serving.common.http.listener import bind
from multiworld_serving.common.http.server import HttpServer, serving
from multiworld_serving.common.service.model_change import ModelChange, request_change
from multiworld_serving.common.service.snapshots import PipelineSnapshot
from multiworld_serving.common.settings.serve import FrontendSettings
from multiworld_serving.server.frontend.api.app import create_admin_app, create_api
from multiworld_serving.server.frontend.api.groups import ModelGroup, ModelGroups
from multiworld_serving.server.frontend.api.inference import Inference, large_image_thread
from multiworld_serving.server.frontend.auth.authorizer import Authorizer
from multiworld_serving.server.frontend.auth.credentials import (
    Credentials,
    read_credentials,
    reload_on_sighup,
    warn_if_unprotected,
)
from multiworld_serving.server.frontend.http.limits import connection_limits, request_limits
from multiworld_serving.server.frontend.leaders.link import LeaderLink
from multiworld_serving.server.frontend.leaders.pool import LeaderPool
from multiworld_serving.server.frontend.leaders.scrape import scrape_service
from multiworld_serving.server.frontend.observability.event_feed import EventFeed
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics
from multiworld_serving.server.frontend.observability.request_records import InferenceProtocol
from multiworld_serving.server.frontend.observability.tracing import RequestTraces, exporting_traces

if TYPE_CHECKING:  # an extra
    from multiworld_serving.server.frontend.api.oip_grpc.grpc_port import GrpcPort

logger = logging.getLogger(__name__)

_REPLACED_S = 30.0
"""Time for a change of the models, in addition to that in which the model starts and the former frontends drain."""


def run(settings: FrontendSettings) -> int:
    """Serve until SIGTERM or Ctrl-C, then finish the requests in flight. Returns the exit status.

    Raises:
        UserError: a port is in use, a credential file is invalid, or the only leader rejects the token.
    """
    raise_descriptor_limit()
    torch.set_num_threads(1)  # a frontend decodes images and computes nothing
    # Nothing here needs gradients, and without autograd's work for each short operation a request takes a tenth less time.
    with torch.inference_mode(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings))


async def _serve(settings: FrontendSettings) -> int:
    """Open what the process needs, and serve."""
    with contextlib.ExitStack() as stack:
        return await _Frontend(settings, stack).serve()


def _listener(fd: int | None, host: str, port: int, name: str, *, reserve: bool = False) -> socket.socket:
    """The socket of a port: the supervisor's, or an own one. See `bind`."""
    if fd is None:
        return bind(host, port, option(name), reserve=reserve)
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)
    return sock


class _Ports(NamedTuple):
    """The sockets of a frontend: listening, and that of gRPC reserved."""

    http: socket.socket
    admin: socket.socket
    grpc: socket.socket | None

    @classmethod
    def open(cls, settings: FrontendSettings, stack: contextlib.ExitStack) -> Self:
        """`stack` closes them."""
        http = stack.enter_context(_listener(settings.http_fd, settings.host, settings.http_port, "http_port"))
        admin = stack.enter_context(
            _listener(settings.admin_fd, settings.admin_address, settings.admin_port, "admin_port")
        )
        if settings.grpc_port is None:
            return cls(http, admin, None)
        grpc = _listener(settings.grpc_fd, settings.host, settings.grpc_port, "grpc_port", reserve=True)
        return cls(http, admin, stack.enter_context(grpc))


class _Frontend:
    """One frontend process."""

    def __init__(self, settings: FrontendSettings, stack: contextlib.ExitStack) -> None:
        self._settings = settings
        self._credentials = read_credentials(settings)
        self._ports = _Ports.open(settings, stack)
        tracer = stack.enter_context(exporting_traces(settings))
        self._stop = asyncio.Event()
        self.metrics = FrontendMetrics()
        self.metrics.requests.traces = None if tracer is None else RequestTraces(tracer)
        self.metrics.requests.log_all = settings.access_log
        models = settings.models
        gc.collect()
        gc.freeze()  # the garbage collector need not scan torch's modules again
        stack.callback(gc.unfreeze)
        leaders = [leader for each in models.values() for leader in each.leaders]
        self.edges = Edges(settings.name, local_host(leaders), settings, EdgeMetrics(self.metrics))
        self.large_images = large_image_thread(request_limits(settings))
        self.started_s = time.monotonic()
        self.models = [_Model(self, name, each) for name, each in models.items()]
        self.groups = ModelGroups(
            *(model.group for model in self.models),
            failing_file=settings.failing_file,
            shares_file=settings.shares_file,
            share_by=settings.share_by,
        )

    @property
    def protocols(self) -> tuple[InferenceProtocol, ...]:
        """Those of the inference requests that it serves."""
        return ("predict", "v2") if self._ports.grpc is None else ("predict", "v2", "grpc")

    async def serve(self) -> int:
        settings = self._settings
        on_stop_signal(self._stop.set)
        warn_if_unprotected(settings, self._credentials)
        try:
            async with self.edges, self.large_images, asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(each) for model in self.models for each in model.run()]
                try:
                    await first_of(self._stop.wait(), self._can_serve())
                    for model in self.models:
                        if model.failure:
                            raise UserError(f"the model {model.pool.name} cannot serve: {model.failure}")
                    if not self._stop.is_set():
                        running.append(tasks.create_task(self._every_second()))
                        await self._serve_http()
                finally:
                    for task in running:
                        task.cancel()
        except* UserError as errors:
            raise errors.exceptions[0] from None
        logger.info("stopped")
        return 0

    async def _can_serve(self) -> None:
        """Wait until a model is known; if other frontends still serve, until all are, and some are ready."""
        wanted = self._settings.wait_until_ready
        if wanted is None:
            await first_of(*(model.known.wait() for model in self.models))
            return
        for model in self.models:
            await (model.ready if model.pool.name in wanted else model.known).wait()

    async def _serve_http(self) -> None:
        settings, metrics, ports = self._settings, self.metrics, self._ports
        authorizer = Authorizer(self._credentials.keys)
        pools = [model.pool for model in self.models]
        scrape = partial(scrape_service, settings.name, pools, metrics, settings.supervisor_metrics_file)
        app = create_api(self.groups, metrics, authorizer, scrape=scrape, admin_port=ports.admin.getsockname()[1])

        async def change_models(change: ModelChange) -> None:
            assert settings.supervisor is not None
            await request_change(settings.supervisor, change, admin.refuses, 2 * settings.drain_timeout_s + _REPLACED_S)
            self.groups.read_shares()

        admin_app = create_admin_app(
            scrape,
            self.groups,
            authorizer,
            change_models=None if settings.supervisor is None else change_models,
            own=metrics.scrape,
            http_port=ports.http.getsockname()[1],
        )
        connections = connection_limits(settings)
        tls = self._credentials
        http = HttpServer(
            *(app, ports.http), max_connections=connections.http, context=tls.http, close_s=settings.drain_timeout_s
        )
        admin = HttpServer(admin_app, ports.admin, max_connections=connections.admin, context=tls.admin)
        metrics.connections.set_function(lambda: http.connections)
        grpc = self._grpc_port(authorizer, connections.grpc)

        def apply(credentials: Credentials) -> None:
            authorizer.keys = credentials.keys
            http.reload_tls(credentials.http)
            admin.reload_tls(credentials.admin)
            if grpc is not None:
                grpc.reload_tls(credentials.grpc)

        reload_on_sighup(settings, apply)
        ready = notify_systemd(lambda: any(pool.ready for pool in pools))
        async with serving(admin), serving(http), grpc or contextlib.nullcontext(), ready:
            logger.info("%s serves http=%s:%d", settings.name, *ports.http.getsockname()[:2])
            await first_of(self._stop.wait(), http.stopped.wait(), admin.stopped.wait())
            logger.info("stopping: waiting for %d open requests", sum(pool.open_requests for pool in pools))
            http.should_exit = True  # both at once
            if grpc is not None:
                grpc.stop(settings.drain_timeout_s)
            for pool in pools:
                pool.stopping = True

    def _grpc_port(self, authorizer: Authorizer, connections: int) -> GrpcPort | None:
        if self._ports.grpc is None:
            return None
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its log has another format; clients cause lines of it
        # An extra, and 30 MB.
        from multiworld_serving.server.frontend.api.oip_grpc.grpc_port import GrpcPort  # noqa: PLC0415

        limits, tls = request_limits(self._settings), self._credentials.grpc
        return GrpcPort(self.groups, limits, self.metrics.requests, authorizer, self._ports.grpc, connections, tls)

    async def _every_second(self) -> None:
        """Record the last second for the status page, and read the shares of versions."""
        while True:
            self.groups.read_shares()
            for group in self.groups:
                group.feed.tick(group.pool.snapshot())
            await asyncio.sleep(1)


class _Model:
    """One model of a frontend: the links to its leaders, and its requests as soon as a leader has described it.

    Args:
        name: "" = the leaders decide it.
        settings: of the frontend, with the leaders and limits of this model.
    """

    def __init__(self, frontend: _Frontend, name: str, settings: FrontendSettings) -> None:
        self._frontend = frontend
        self._settings = settings
        self.known, self.ready = asyncio.Event(), asyncio.Event()
        self.failure = ""
        self.pool = LeaderPool(settings.recovery_grace_s, frontend.metrics, self._on_change, frontend.edges, name)
        for number, address in enumerate(settings.leaders):
            self.pool.links.append(LeaderLink(address, settings, self.pool, number))
        requests = frontend.metrics.requests.of_model(name, settings.latency_objective_s)
        self.group = ModelGroup(self.pool, requests, EventFeed(requests))

    def run(self) -> list[Coroutine[Any, Any, None]]:
        """What must run as tasks until the frontend ends."""
        return [*(link.run() for link in self.pool.links), self._serve()]

    async def _serve(self) -> None:
        served = await asyncio.shield(self.pool.model)
        model = replace(served, name=self.group.model)
        limits = request_limits(self._settings)
        limits = replace(limits, max_held_bytes=limits.max_held_bytes // len(self._frontend.models))
        inference = Inference(self.pool, model, limits, self._frontend.large_images)
        self.group.requests.declare(self.pool.name, model.version, self._frontend.protocols)
        async with inference.threads:
            self.group.open(inference)
            self.known.set()
            await asyncio.Event().wait()

    def _on_change(self, snapshot: PipelineSnapshot) -> None:
        self.group.feed.observe(snapshot)
        if self.ready.is_set():
            return
        if snapshot.ready:
            self.ready.set()
            after_s = time.monotonic() - self._frontend.started_s
            logger.info("ready model=%s version=%s after_s=%.1f", snapshot.model, snapshot.version, after_s)
        elif snapshot.failure and self.pool.name in (self._settings.wait_until_ready or ()):
            self.failure = snapshot.failure
            self.ready.set()
