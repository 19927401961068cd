"""The leader's side of the frontends: starts and monitors their processes and handles their frames."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fastapi import FastAPI
from pydantic import SecretStr

from multiworld_serving.common.config import UserError
from multiworld_serving.server.errors import RequestRefused
from multiworld_serving.server.frontends.asgi_proxy import AsgiProxyServer
from multiworld_serving.server.frontends.credential_files import read_credential_files
from multiworld_serving.server.frontends.frames import Frame, FrameConnection, FrameKind
from multiworld_serving.server.frontends.messages import (
    parse_image,
    parse_outcome,
    prediction_fields,
    prediction_payload,
    refusal_fields,
    state_fields,
)
from multiworld_serving.server.leader import Leader
from multiworld_serving.server.observability.metrics import InferenceProtocol, Metrics
from multiworld_serving.server.observability.request_recorder import LocalRequestRecorder, RequestOutcome
from multiworld_serving.server.observability.request_traces import current_span, remote_span
from multiworld_serving.server.predictor import ServedModel
from multiworld_serving.server.processes import FrontendProcesses
from multiworld_serving.server.settings import ServeSettings

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 1.0
_FROZEN_S = 5.0
"""A frontend that sends nothing for this long is killed; at least `_FROZEN_HEARTBEATS` heartbeat timeouts."""
_FROZEN_HEARTBEATS = 3
_RECENT_S = 1.0
"""How long a frontend's report of its number of requests in preparation is used."""
_RETRY_S = 1.0
_REPLY_TIMEOUT_S = {
    FrameKind.PREPARE_CREDENTIALS: 10.0,
    FrameKind.APPLY_CREDENTIALS: 10.0,
}  # seconds; requests of other kinds have no timeout here
_PRIVATE = frozenset({"token", "token_file"})
"""Settings that are not sent to frontends."""


class FrontendManager:
    """Starts the frontends, accepts their connections and handles their frames while its `async with` block runs.

    Args:
        app: handles requests that are not inference. The manager runs its lifespan.
        recorder: records the requests of all frontends.
        http: listening socket that all frontends share; closed on exit.
        start: starts the frontend processes, which connect to the Unix socket at the given path.

    Attributes:
        ended: set if a background task failed and the manager cannot continue.
    """

    def __init__(
        self,
        settings: ServeSettings,
        model: ServedModel,
        leader: Leader,
        app: FastAPI,
        recorder: LocalRequestRecorder,
        metrics: Metrics,
        http: socket.socket,
        start: Callable[[str], AbstractAsyncContextManager[FrontendProcesses]],
    ) -> None:
        self.model = model
        self.leader = leader
        self.app = app
        self.recorder = recorder
        self.ended = asyncio.Event()
        self._settings = settings
        self._files = self._prepared_files = read_credential_files(settings)
        self._metrics = metrics
        self._http = http
        self._start = start
        self._processes: FrontendProcesses | None = None
        self._sessions: set[FrontendSession] = set()
        self._frozen_s = max(_FROZEN_S, _FROZEN_HEARTBEATS * settings.heartbeat_timeout_s)
        self._exits = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.app.router.lifespan_context(self.app))
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="multiworld-")
            )  # accessible to this user only
            path = str(Path(folder) / "leader")
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                listener.bind(path)
            except OSError as error:
                raise UserError(
                    f"cannot listen at {path}: {error}; set TMPDIR to another folder, or one with a shorter path"
                ) from error
            listener.listen()
            listener.setblocking(False)
            stack.callback(self._close_sessions)
            for work in (self._accept(listener), self._monitor()):
                task = asyncio.create_task(work)
                task.add_done_callback(lambda _: self.ended.set())
                stack.push_async_callback(_cancel, task)
            self._processes = await stack.enter_async_context(self._start(path))
            self.leader.inflight.remote = self
            # Frontends have copies. With this copy open, the kernel would accept clients after the last frontend has ended.
            stack.callback(self._http.close)
            self._exits = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._exits.aclose()

    def state_changed(self) -> None:
        """Send the new state to all frontends: the version changed, or requests are rejected, or accepted again."""
        for session in self._sessions:
            session.send_state()

    async def prepare_credentials(self) -> None:
        """See `CredentialTarget`."""
        files = read_credential_files(self._settings)
        prepared: set[FrontendSession] = set()
        while fresh := self._sessions - prepared:  # frontends that connect meanwhile have the old files
            if failures := await self._request_all(FrameKind.PREPARE_CREDENTIALS, files, fresh):
                raise UserError("; ".join(f"{name} cannot use the new ones ({failures[name]})" for name in failures))
            prepared |= fresh
        self._prepared_files = files

    async def apply_credentials(self) -> dict[str, str]:
        """See `CredentialTarget`."""
        self._files = self._prepared_files
        return await self._request_all(FrameKind.APPLY_CREDENTIALS)

    # -- RemoteInflight --------------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Requests in flight at the frontends."""
        return sum(len(session.requests) for session in self._sessions)

    async def wait_idle(self) -> None:
        """Wait until every frontend has confirmed that it has no request in flight, including those not yet reported here."""
        self.state_changed()
        await self._request_all(FrameKind.QUIESCE)

    async def sync_state(self) -> None:
        """Wait until every frontend knows the current state of the leader."""
        await self._request_all(FrameKind.STATE, self.state())

    # -- called by sessions ----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """See `FrameKind.STATE`."""
        return state_fields(self.leader.version, self.leader.closed())

    def welcome(self) -> dict[str, Any]:
        """Fields of `FrameKind.WELCOME`."""
        settings = {name: value for name, value in self._settings if name not in _PRIVATE}
        plain = {name: v.get_secret_value() if isinstance(v, SecretStr) else v for name, v in settings.items()}
        plain = {name: str(value) if isinstance(value, Path) else value for name, value in plain.items()}
        return {"settings": plain, "files": self._files, "model": vars(self.model)}

    def on_connected(self, session: FrontendSession) -> None:
        """Add a frontend that has sent its name."""
        self._sessions.add(session)

    def on_serving(self, session: FrontendSession) -> None:
        """Handle that a frontend now serves clients."""
        logger.info("frontend %s serves", session.name)
        if self._processes is not None:
            self._processes.proven(session.name)
        self._publish_frontends()

    def on_disconnected(self, session: FrontendSession) -> None:
        """Remove a frontend whose connection has closed."""
        self._sessions.discard(session)
        logger.info("frontend %s disconnected requests=%d", session.name or "without a name", len(session.requests))
        for number, (protocol, began_s) in session.requests.items():  # their clients were disconnected
            lost_s = time.monotonic() - began_s
            version = self.leader.version.name
            self.recorder.request_ended(number, RequestOutcome(version, protocol, 500, "internal", lost_s, None))
        session.requests.clear()
        self._publish_frontends()

    def ahead(self, session: FrontendSession) -> int:
        """Requests in preparation at all frontends, as reported recently."""
        recent_s = session.heard_s - _RECENT_S
        return sum(each.ahead for each in self._sessions if each is session or each.ahead_s > recent_s)

    def on_connection_count(self) -> None:
        """Update the metric of open connections."""
        self._metrics.connections(sum(session.connections for session in self._sessions))

    def connection_closed(self, reason: str) -> None:
        """Count a connection that a frontend closed."""
        self._metrics.connection_closed(reason)

    # -- internal --------------------------------------------------------------------------------------------------------------

    def _close_sessions(self) -> None:
        for session in tuple(self._sessions):
            session.link.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection = None
            try:
                connection, _ = await loop.sock_accept(listener)
                # Does not block: the socket is new, so its send buffer is empty.
                socket.send_fds(connection, [b"\0"], [self._http.fileno()])
                session = FrontendSession(self)
                await loop.connect_accepted_socket(lambda session=session: session.link, connection)  # type: ignore[misc]
            except OSError as error:
                logger.warning("cannot accept a frontend: %s", error)
                if connection is not None:
                    connection.close()
                await asyncio.sleep(_RETRY_S)

    async def _monitor(self) -> None:
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(_CHECK_INTERVAL_S)
            late_s = time.monotonic() - began_s - _CHECK_INTERVAL_S
            for session in tuple(self._sessions):
                if late_s > _CHECK_INTERVAL_S:  # this process was blocked and could not read
                    session.heard_s += late_s
                if session.serving and session.silent_s > self._frozen_s:
                    logger.error("frontend %s sent nothing for %.1f s: killing it", session.name, session.silent_s)
                    session.link.close()
                    if self._processes is not None:
                        self._processes.end(session.name)
                else:
                    session.link.send(FrameKind.PING)

    async def _request_all(
        self, kind: FrameKind, fields: Mapping[str, Any] | None = None, sessions: Collection[FrontendSession] = ()
    ) -> dict[str, str]:
        """Send a request to all frontends, or to these. Returns errors by name; a frontend that disconnects has none."""
        asked = tuple(sessions or self._sessions)
        said = await asyncio.gather(*(session.request(kind, fields) for session in asked))
        return {session.name: why for session, why in zip(asked, said, strict=True) if why}

    def _publish_frontends(self) -> None:
        names = {session.name for session in self._sessions if session.serving}
        self._metrics.frontends(len(names))
        self.on_connection_count()
        if self._processes is not None:
            self._processes.present(names)


class FrontendSession:
    """The connection to one frontend.

    Attributes:
        serving: whether it serves clients.
        heard_s: time of its last frame.
        ahead: its number of requests in preparation, as reported at `ahead_s`.
        requests: its requests in flight: protocol and start time.
        connections: its number of open connections.
    """

    def __init__(self, manager: FrontendManager) -> None:
        self.name = ""
        self.serving = False
        self.link = FrameConnection(self._on_frame, self._on_lost)
        self.heard_s = time.monotonic()
        self.ahead, self.ahead_s = 0, 0.0
        self.requests: dict[int, tuple[InferenceProtocol, float]] = {}
        self.connections = 0
        self._manager = manager
        self._proxy = AsgiProxyServer(manager.app, self.link)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._pending: dict[int, asyncio.Future[str]] = {}
        self._numbers = itertools.count(1)
        self._lost = False

    @property
    def silent_s(self) -> float:
        """Seconds since its last frame. Its event loop replies to each PING."""
        return time.monotonic() - self.heard_s

    def send_state(self) -> None:
        """See `FrameKind.STATE`."""
        self.link.send(FrameKind.STATE, fields=self._manager.state())

    async def request(self, kind: FrameKind, fields: Mapping[str, Any] | None) -> str:
        """Send a request and wait for DONE or the end of the connection. Returns the error, or an empty string."""
        if self._lost:
            return ""
        number = next(self._numbers)
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pending[number] = done
        self.link.send(kind, number, fields)
        try:
            return await asyncio.wait_for(done, _REPLY_TIMEOUT_S.get(kind))
        except TimeoutError:
            return f"no reply within {_REPLY_TIMEOUT_S[kind]:g} s"

    def _on_frame(self, frame: Frame) -> None:
        self.heard_s = time.monotonic()
        match frame.kind:
            case FrameKind.CHECK:
                self._check(frame)
            case FrameKind.PREDICT:
                task = self._tasks[frame.number] = asyncio.create_task(self._predict(frame))
                task.add_done_callback(lambda _: self._tasks.pop(frame.number, None))
            case FrameKind.CANCEL:
                if (known := self._tasks.get(frame.number)) is not None:
                    known.cancel()
            case (
                FrameKind.REQUEST_STARTED
                | FrameKind.REQUEST_ENDED
                | FrameKind.CONNECTION_COUNT
                | FrameKind.CONNECTION_CLOSED
            ):
                self._record(frame)
            case FrameKind.REQUEST | FrameKind.ACK | FrameKind.DISCONNECTED:
                self._proxy.on_frame(frame)
            case FrameKind.DONE:
                _complete(self._pending.pop(frame.number), str(frame.fields.get("error", "")))
            case FrameKind.HELLO:
                self.name = str(frame.fields["name"])
                self._manager.on_connected(self)
                self.send_state()
                self.link.send(FrameKind.WELCOME, fields=self._manager.welcome())
            case FrameKind.SERVING:
                self.serving = True
                self._manager.on_serving(self)
            case FrameKind.PONG:
                pass
            case _:
                raise ValueError(f"unexpected frame {frame.kind.name}")

    def _record(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.REQUEST_STARTED:
                self._manager.recorder.request_started(frame.fields["protocol"])
                self.requests[frame.number] = (frame.fields["protocol"], self.heard_s)
            case FrameKind.REQUEST_ENDED:
                del self.requests[frame.number]
                self._manager.recorder.request_ended(frame.number, parse_outcome(frame.fields))
            case FrameKind.CONNECTION_COUNT:
                self.connections = int(frame.fields["count"])
                self._manager.on_connection_count()
            case FrameKind.CONNECTION_CLOSED:
                self._manager.connection_closed(frame.fields["reason"])

    def _check(self, frame: Frame) -> None:
        self.ahead, self.ahead_s = int(frame.fields["ahead"]), self.heard_s
        refusal = self._manager.leader.refusal(frame.fields["deadline_s"], self._manager.ahead(self))
        if refusal is None:
            self.link.send(FrameKind.ADMITTED, frame.number)
        else:
            self.link.send(FrameKind.REFUSED, frame.number, refusal_fields(refusal))

    async def _predict(self, frame: Frame) -> None:
        fields = frame.fields
        if fields["span"] is not None:
            current_span.set(remote_span(*fields["span"]))
        try:
            image = parse_image(frame.payload, self._manager.model.crop_size)
            prediction = await self._manager.leader.predict(
                image, deadline_s=fields["deadline_s"], request_id=fields["request_id"]
            )
            await self.link.wait_writable()
            self.link.send(
                FrameKind.PREDICTION, frame.number, prediction_fields(prediction), prediction_payload(prediction)
            )
        except RequestRefused as refusal:
            self.link.send(FrameKind.REFUSED, frame.number, refusal_fields(refusal))
        except Exception:
            logger.exception("request failed request_id=%s", fields["request_id"])
            self.link.send(FrameKind.REFUSED, frame.number, refusal_fields(None))

    def _on_lost(self) -> None:
        self._lost = True
        for task in self._tasks.values():
            task.cancel()
        for done in self._pending.values():
            _complete(done)
        self._proxy.on_lost()
        self._manager.on_disconnected(self)


def _complete(done: asyncio.Future[str], failure: str = "") -> None:
    if not done.done():  # the waiter may have been cancelled
        done.set_result(failure)


async def _cancel(task: asyncio.Task[None]) -> None:
    if task.done() and not task.cancelled() and task.exception() is not None:
        logger.error("the frontend manager failed", exc_info=task.exception())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
