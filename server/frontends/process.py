"""The process of a frontend: serves HTTP on the socket that all frontends share, and sends inference to the leader."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import Coroutine, Mapping
from typing import Any

import torch
import uvloop

from multiworld_serving.common.config import UserError, kill_on_parent_death, raise_descriptor_limit
from multiworld_serving.common.http.connection_table import ConnectionTable
from multiworld_serving.common.http.server import HttpServer, serving, within_descriptor_limit
from multiworld_serving.common.tracing import close_on_exit, start_tracing
from multiworld_serving.server.api.app import create_inference_app
from multiworld_serving.server.auth.authorizer import Authorizer
from multiworld_serving.server.auth.credential_reloader import Credentials
from multiworld_serving.server.frontends.asgi_proxy import AsgiProxy
from multiworld_serving.server.frontends.credential_files import load_credentials
from multiworld_serving.server.frontends.frames import Frame, FrameConnection, FrameKind
from multiworld_serving.server.frontends.remote_predictor import RemotePredictor
from multiworld_serving.server.frontends.remote_recorder import RemoteRequestRecorder
from multiworld_serving.server.http.limits import connection_limits, request_limits
from multiworld_serving.server.observability.request_traces import RequestTraces
from multiworld_serving.server.predictor import ServedModel
from multiworld_serving.server.settings import ServeSettings

logger = logging.getLogger(__name__)


def run(leader: str, name: str) -> int:
    """Serve until SIGTERM or until the connection to the leader is lost. Returns the exit status.

    Args:
        leader: path of the leader's Unix socket.
        name: of this frontend.
    Raises:
        UserError: no leader listens there.
    """
    # End with the leader, even if this process is blocked: otherwise the next leader could not use the port.
    with contextlib.suppress(OSError):
        kill_on_parent_death()
    raise_descriptor_limit()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            link.connect(leader)
            _, fds, _, _ = socket.recv_fds(link, 1, 1)
        except OSError as error:
            raise UserError(
                f"no leader listens at {leader}: {error.strerror}; `multiworld serve` starts frontends"
            ) from error
        if not fds:
            raise UserError(f"the leader at {leader} closed the connection; start the service again")
        http = stack.enter_context(socket.socket(fileno=fds[0]))
        http.setblocking(False)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(name, link, http))


async def _serve(name: str, connection: socket.socket, http: socket.socket) -> int:
    frontend = _Frontend()
    connection.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: frontend.link, sock=connection)
    frontend.link.send(FrameKind.HELLO, fields={"name": name})
    welcome = await frontend.welcome
    if welcome is None:
        logger.error("the leader closed the connection")
        return 1
    settings = ServeSettings(**welcome["settings"])
    tracing = start_tracing(
        settings.otlp_endpoint,
        service="multiworld-frontend",
        instance=f"{socket.gethostname()}-{os.getpid()}",
        ratio=settings.trace_ratio,
    )
    with close_on_exit(tracing):
        traces = RequestTraces(tracing) if tracing else None
        await frontend.serve(settings, welcome["files"], _model(welcome["model"]), http, traces)
    return 0


class _Frontend:
    """Handles the leader's frames and runs the HTTP server.

    Attributes:
        welcome: fields of the leader's WELCOME frame; None if the connection was lost.
    """

    def __init__(self) -> None:
        self.link = FrameConnection(self._on_frame, self._on_lost)
        self.welcome: asyncio.Future[Mapping[str, Any] | None] = asyncio.get_running_loop().create_future()
        self._predictor = RemotePredictor(self.link)
        self._proxy: AsgiProxy | None = None
        self._stop = asyncio.Event()
        self._server: asyncio.Future[tuple[HttpServer, Authorizer]] = asyncio.get_running_loop().create_future()
        self._settings: ServeSettings | None = None
        self._prepared: Credentials | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(
        self,
        settings: ServeSettings,
        files: Mapping[str, str],
        model: ServedModel,
        http: socket.socket,
        traces: RequestTraces | None,
    ) -> None:
        """Serve HTTP until SIGTERM or until the connection to the leader is lost."""
        self._settings = settings
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._stop.set)
        credentials = load_credentials(settings, files)
        authorizer = Authorizer(credentials.keys)
        recorder = RemoteRequestRecorder(self.link)
        inference = create_inference_app(self._predictor, model, request_limits(settings), recorder, authorizer, traces)
        self._proxy = AsgiProxy(inference, self.link)
        limits = within_descriptor_limit(connection_limits(settings, shares=settings.frontends))
        server = HttpServer(
            self._proxy,
            http,
            ConnectionTable(limits, recorder.connection_closed, recorder.connections),
            context=credentials.contexts["http_port"],
            access_log=settings.access_log,
        )
        async with serving(server):
            if await _first(server.listening, server.stopped) is server.listening:
                self._server.set_result((server, authorizer))
                self.link.send(FrameKind.SERVING)
                await _first(self._stop, server.stopped)
            http.close()  # frees the port for the next service while this process finishes its requests
            if not self._predictor.closed:
                server.set_graceful_timeout(settings.drain_timeout_s)

    def _on_frame(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.PREDICTION | FrameKind.REFUSED | FrameKind.ADMITTED:
                self._predictor.on_reply(frame)
            case FrameKind.RESPONSE | FrameKind.END if self._proxy is not None:
                self._proxy.on_frame(frame)
            case FrameKind.STATE:
                self._predictor.on_state(frame.fields)
                if frame.number:
                    self.link.send(FrameKind.DONE, frame.number)
            case FrameKind.PING:
                self.link.send(FrameKind.PONG)
            case FrameKind.QUIESCE:
                self._run_and_reply(frame.number, self._predictor.inflight.wait_idle())
            case FrameKind.PREPARE_CREDENTIALS:
                self._run_and_reply(frame.number, self._prepare(frame.fields))
            case FrameKind.APPLY_CREDENTIALS:
                self._run_and_reply(frame.number, self._use())
            case FrameKind.WELCOME:
                self.welcome.set_result(frame.fields)
            case _:
                raise ValueError(f"unexpected frame {frame.kind.name}")

    def _run_and_reply(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task and send DONE with its error, if any."""

        async def do() -> None:
            fields = {"error": "the frontend is stopping"}
            try:
                await work
                fields = {}
            except Exception as error:
                logger.exception("a request of the leader failed")
                fields = {"error": str(error) or type(error).__name__}
            finally:
                self.link.send(FrameKind.DONE, number, fields)

        task = asyncio.create_task(do())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _prepare(self, files: Mapping[str, str]) -> None:
        await self._server  # until then it uses the credentials of WELCOME
        assert self._settings is not None
        self._prepared = None
        self._prepared = load_credentials(self._settings, files)

    async def _use(self) -> None:
        server, authorizer = await self._server
        prepared, self._prepared = self._prepared, None
        assert prepared is not None, "the leader sends PREPARE_CREDENTIALS first"
        prepared.apply(authorizer, {"http_port": server})

    def _on_lost(self) -> None:
        if not self._stop.is_set():
            logger.warning("the connection to the leader was lost: stopping")
        self._stop.set()
        self._predictor.on_lost()
        if self._proxy is not None:
            self._proxy.on_lost()
        if not self.welcome.done():
            self.welcome.set_result(None)


async def _first(*events: asyncio.Event) -> asyncio.Event:
    """Wait until one of the events is set; returns that one."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    return next(event for event in events if event.is_set())


def _model(fields: Mapping[str, Any]) -> ServedModel:
    return ServedModel(**{**fields, "labels": tuple(fields["labels"])})
