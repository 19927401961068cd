"""Proxies requests that are not inference from a frontend to the leader: ASGI messages as frames."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from multiworld_serving.server.frontends.frames import Frame, FrameConnection, FrameKind
from multiworld_serving.server.frontends.remote_predictor import leader_lost_error
from multiworld_serving.server.http.errors import internal_error_response, refusal_response
from multiworld_serving.server.http.request_tracker import inference_protocol
from multiworld_serving.server.observability.request_record import RequestRecord

logger = logging.getLogger(__name__)

_TEXTS = ("http_version", "method", "scheme", "path", "root_path")


class AsgiProxy:
    """The frontend's side: an ASGI application that handles inference locally and forwards other requests to the leader.

    Request bodies are not forwarded: no forwarded endpoint reads one.

    Args:
        inference: the application for inference requests.
    """

    def __init__(self, inference: ASGIApp, link: FrameConnection) -> None:
        self._inference = inference
        self._connection = link
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Queue[Frame | None]] = {}
        self._lost = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http" or inference_protocol(scope["path"]) is not None:
            await self._inference(scope, receive, send)
            return
        number = next(self._numbers)
        frames = self._open[number] = asyncio.Queue()
        if self._lost:
            frames.put_nowait(None)
        self._connection.send(FrameKind.REQUEST, number, _scope_fields(scope))
        client = asyncio.create_task(self._watch_disconnect(number, receive))
        begun = False
        try:
            while (frame := await frames.get()) is not None and frame.kind is FrameKind.RESPONSE:
                begun = True
                await send(_message(frame))
                self._connection.send(FrameKind.ACK, number)
        finally:
            client.cancel()
            del self._open[number]
            self._connection.send(FrameKind.DISCONNECTED, number)
        if frame is not None and not frame.fields["failed"]:
            return
        if begun:  # too late for an error response: the server closes the connection
            raise ConnectionError("the leader failed on this request, or its connection was lost")
        record = RequestRecord.begin(scope, "")
        response = refusal_response(leader_lost_error(), record) if frame is None else internal_error_response(record)
        response.headers["X-Request-Id"] = record.request_id
        await response(scope, receive, send)

    def on_frame(self, frame: Frame) -> None:
        """Handle a part or the end of a response."""
        if (frames := self._open.get(frame.number)) is not None:
            frames.put_nowait(frame)

    def on_lost(self) -> None:
        """Fail all open requests: the connection to the leader was lost."""
        self._lost = True
        for frames in self._open.values():
            frames.put_nowait(None)

    async def _watch_disconnect(self, number: int, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._connection.send(FrameKind.DISCONNECTED, number)


class AsgiProxyServer:
    """The leader's side, for one frontend.

    Args:
        app: the application that handles the requests.
    """

    def __init__(self, app: ASGIApp, link: FrameConnection) -> None:
        self._app = app
        self._connection = link
        self._open: dict[int, _ProxiedRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on_frame(self, frame: Frame) -> None:
        """See `FrameKind`. Raises KeyError or TypeError if the frame is invalid."""
        if frame.kind is FrameKind.REQUEST:
            request = self._open[frame.number] = _ProxiedRequest(frame.number, self._connection)
            task = asyncio.create_task(self._respond(request, _scope(frame.fields)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (known := self._open.get(frame.number)) is not None:
            known.proceed(gone=frame.kind is FrameKind.DISCONNECTED)

    def on_lost(self) -> None:
        """Disconnect all clients: the connection to the frontend was lost."""
        for request in self._open.values():
            request.proceed(gone=True)

    async def _respond(self, request: _ProxiedRequest, scope: Scope) -> None:
        failed = False
        try:
            await self._app(scope, request.receive, request.send)
        except Exception:
            logger.exception("request failed path=%s", scope["path"])
            failed = True
        finally:
            del self._open[request.number]
            self._connection.send(FrameKind.END, request.number, {"failed": failed})


class _ProxiedRequest:
    """One forwarded request."""

    def __init__(self, number: int, link: FrameConnection) -> None:
        self.number = number
        self._connection = link
        self._acked = asyncio.Event()
        self._gone = asyncio.Event()
        self._begun = False

    async def receive(self) -> Message:
        if not self._begun:
            self._begun = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send a message; returns after the frontend has sent it to the client, so that a slow client causes backpressure."""
        self._acked.clear()
        await self._connection.wait_writable()
        self._connection.send(FrameKind.RESPONSE, self.number, _message_fields(message), message.get("body", b""))
        if not self._gone.is_set():
            await self._acked.wait()

    def proceed(self, *, gone: bool) -> None:
        if gone:
            self._gone.set()
        self._acked.set()


def _scope_fields(scope: Scope) -> dict[str, Any]:
    return {name: scope[name] for name in _TEXTS if name in scope} | {
        "client": scope.get("client"),
        "server": scope.get("server"),
        "query": scope["query_string"].decode("latin-1"),
        "headers": _texts(scope["headers"]),
    }


def _scope(fields: Mapping[str, Any]) -> Scope:
    return {name: fields[name] for name in _TEXTS if name in fields} | {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "client": fields["client"] and tuple(fields["client"]),
        "server": fields["server"] and tuple(fields["server"]),
        "query_string": fields["query"].encode("latin-1"),
        "headers": _pairs(fields["headers"]),
    }


def _message_fields(message: Message) -> dict[str, Any]:
    if message["type"] == "http.response.start":
        return {"type": message["type"], "status": message["status"], "headers": _texts(message.get("headers", ()))}
    return {"type": message["type"], "more_body": message.get("more_body", False)}


def _message(frame: Frame) -> Message:
    fields = dict(frame.fields)
    if "headers" in fields:
        return fields | {"headers": _pairs(fields["headers"])}
    return fields | {"body": bytes(frame.payload)}


def _texts(pairs: Any) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in pairs]


def _pairs(texts: Any) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in texts]
