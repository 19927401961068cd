"""A frontend: a process that serves HTTP on the socket that all of them share, and asks the leader."""

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

from config import UserError, end_with_parent, raise_descriptor_limit
from server.access import Gate
from server.connections import Connections
from server.frontend import create_inference_app
from server.frontends.credential_files import credentials_of
from server.frontends.forwarding import Forwarding
from server.frontends.frames import Frame, FrameLink, Kind
from server.frontends.remote_accounts import RemoteAccounts
from server.frontends.remote_predictor import RemotePredictor
from server.http_server import HttpServer, affordable, serving
from server.limits import connection_limits, frontend_limits
from server.predictor import ServedModel
from server.request_traces import RequestTraces
from server.settings import ServeSettings
from tracing import start_tracing
from tracing.provider import closing

logger = logging.getLogger(__name__)


def run(leader: str, name: str) -> int:
    """Serve until SIGTERM, or until the leader is gone. Gives the exit status.

    Args:
        leader: path of the Unix socket at which it listens.
        name: of this frontend.
    Raises:
        UserError: there is no leader.
    """
    # The leader's end shall be ours, even when we are frozen: else the port would not be free for the next one.
    with contextlib.suppress(OSError):
        end_with_parent()
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
                f"there is no leader at {leader}: {error.strerror}; `multiworld serve` starts frontends"
            ) from error
        if not fds:
            raise UserError(f"the leader at {leader} has ended")
        http = stack.enter_context(socket.socket(fileno=fds[0]))
        http.setblocking(False)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(name, link, http))


async def _serve(name: str, connection: socket.socket, http: socket.socket) -> int:
    frontend = _Frontend()
    connection.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: frontend.link, sock=connection)
    frontend.link.send(Kind.HERE, facts={"name": name})
    welcome = await frontend.welcome
    if welcome is None:
        logger.error("the leader has ended")
        return 1
    settings = ServeSettings(**welcome["settings"])
    tracing = start_tracing(
        settings.otlp_endpoint,
        service="multiworld-frontend",
        instance=f"{socket.gethostname()}-{os.getpid()}",
        ratio=settings.trace_ratio,
    )
    with closing(tracing):
        traces = RequestTraces(tracing) if tracing else None
        await frontend.serve(settings, welcome["files"], _model(welcome["model"]), http, traces)
    return 0


class _Frontend:
    """What the leader says, and who is to know of it.

    Attributes:
        welcome: what the leader wants its frontends to know; None when it has ended.
    """

    def __init__(self) -> None:
        self.link = FrameLink(self._on_frame, self._on_lost)
        self.welcome: asyncio.Future[Mapping[str, Any] | None] = asyncio.get_running_loop().create_future()
        self._predictor = RemotePredictor(self.link)
        self._forwarding: Forwarding | None = None
        self._stop = asyncio.Event()
        self._server: asyncio.Future[tuple[HttpServer, Gate]] = asyncio.get_running_loop().create_future()
        self._settings: ServeSettings | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(
        self,
        settings: ServeSettings,
        files: Mapping[str, str],
        model: ServedModel,
        http: socket.socket,
        traces: RequestTraces | None,
    ) -> None:
        """Serve HTTP until SIGTERM, or until the leader is gone."""
        self._settings = settings
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, self._stop.set)
        credentials = credentials_of(settings, files)
        gate = Gate(credentials.rings)
        accounts = RemoteAccounts(self.link)
        inference = create_inference_app(self._predictor, model, frontend_limits(settings), accounts, gate, traces)
        self._forwarding = Forwarding(inference, self.link)
        limits = affordable(connection_limits(settings, shares=settings.frontends))
        server = HttpServer(
            self._forwarding,
            http,
            Connections(limits, accounts.connection_closed, accounts.connections),
            context=credentials.contexts["http_port"],
            access_log=settings.access_log,
        )
        async with serving(server):
            if await _first(server.listening, server.stopped) is server.listening:
                self._server.set_result((server, gate))
                self.link.send(Kind.SERVES)
                await _first(self._stop, server.stopped)
            http.close()  # so that whoever serves next may have the port while we answer what has begun
            if not self._predictor.closed:
                server.answer_within(settings.drain_timeout_s)

    def _on_frame(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.ANSWER | Kind.REFUSED | Kind.FINE:
                self._predictor.on_reply(frame)
            case Kind.RESPONSE | Kind.OVER if self._forwarding is not None:
                self._forwarding.on_frame(frame)
            case Kind.STATE:
                self._predictor.on_state(frame.facts)
                if frame.number:
                    self.link.send(Kind.DONE, frame.number)
            case Kind.PING:
                self.link.send(Kind.PONG)
            case Kind.SETTLE:
                self._do(frame.number, self._predictor.under_way.none())
            case Kind.RENEW:
                self._do(frame.number, self._renew(frame.facts))
            case Kind.WELCOME:
                self.welcome.set_result(frame.facts)
            case _:
                raise ValueError(f"{frame.kind.name} was not to be expected here")

    def _do(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        """Something that the leader waits for."""

        async def do() -> None:
            try:
                await work
            except Exception:
                logger.exception("what the leader asked for cannot be done")
            finally:
                self.link.send(Kind.DONE, number)

        task = asyncio.create_task(do())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _renew(self, files: Mapping[str, str]) -> None:
        server, gate = await self._server  # until then it has those of its welcome
        assert self._settings is not None
        credentials = credentials_of(self._settings, files)
        context = credentials.contexts["http_port"]
        if context is not None:
            await server.exchange(context)
        gate.rings = credentials.rings

    def _on_lost(self) -> None:
        if not self._stop.is_set():
            logger.warning("the leader is gone: stopping")
        self._stop.set()
        self._predictor.on_lost()
        if self._forwarding is not None:
            self._forwarding.on_lost()
        if not self.welcome.done():
            self.welcome.set_result(None)


async def _first(*events: asyncio.Event) -> asyncio.Event:
    """Wait until one of them is set; gives that one."""
    tasks = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    return next(event for event in events if event.is_set())


def _model(facts: Mapping[str, Any]) -> ServedModel:
    return ServedModel(**{**facts, "labels": tuple(facts["labels"])})
