"""Requests that are no inference, which the leader answers: what ASGI says of them travels between its application and the client."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.frontends.frames import Frame, FrameLink, Kind
from server.request_tracker import inference_protocol

logger = logging.getLogger(__name__)

_TEXTS = ("http_version", "method", "scheme", "path", "root_path")


class Forwarding:
    """The frontend's end: an ASGI application that answers inference by itself, and has all else answered by the leader.

    Bodies stay here, because nothing that the leader answers on this port has one.

    Args:
        inference: the application for requests that are inference.
    """

    def __init__(self, inference: ASGIApp, link: FrameLink) -> None:
        self._inference = inference
        self._link = link
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Queue[Frame | None]] = {}
        self._lost = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or inference_protocol(scope["path"]) is not None:
            await self._inference(scope, receive, send)
            return
        number = next(self._numbers)
        answer = self._open[number] = asyncio.Queue()
        if self._lost:
            answer.put_nowait(None)
        self._link.send(Kind.REQUEST, number, _scope_facts(scope))
        client = asyncio.create_task(self._tell_when_gone(number, receive))
        try:
            while (frame := await answer.get()) is not None and frame.kind is Kind.RESPONSE:
                await send(_message(frame))
                self._link.send(Kind.TAKEN, number)
        finally:
            client.cancel()
            del self._open[number]
            self._link.send(Kind.GONE, number)
        if frame is None or frame.facts["failed"]:
            raise ConnectionError("the leader failed on this request, or is gone")

    def on_frame(self, frame: Frame) -> None:
        """The leader has answered, or a part of it."""
        if (answer := self._open.get(frame.number)) is not None:
            answer.put_nowait(frame)

    def on_lost(self) -> None:
        """The leader is gone."""
        self._lost = True
        for answer in self._open.values():
            answer.put_nowait(None)

    async def _tell_when_gone(self, number: int, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._link.send(Kind.GONE, number)


class Forwarded:
    """The leader's end, for one frontend.

    Args:
        app: the application that answers.
    """

    def __init__(self, app: ASGIApp, link: FrameLink) -> None:
        self._app = app
        self._link = link
        self._open: dict[int, _Exchange] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def on_frame(self, frame: Frame) -> None:
        """See `Kind`. Raises KeyError, TypeError when it makes no sense."""
        if frame.kind is Kind.REQUEST:
            exchange = self._open[frame.number] = _Exchange(frame.number, self._link)
            task = asyncio.create_task(self._answer(exchange, _scope(frame.facts)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (known := self._open.get(frame.number)) is not None:
            known.proceed(gone=frame.kind is Kind.GONE)

    def on_lost(self) -> None:
        """The frontend is gone, and all clients with it."""
        for exchange in self._open.values():
            exchange.proceed(gone=True)

    async def _answer(self, exchange: _Exchange, scope: Scope) -> None:
        failed = False
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception:
            logger.exception("request failed path=%s", scope["path"])
            failed = True
        finally:
            del self._open[exchange.number]
            self._link.send(Kind.OVER, exchange.number, {"failed": failed})


class _Exchange:
    """One request that is being answered."""

    def __init__(self, number: int, link: FrameLink) -> None:
        self.number = number
        self._link = link
        self._taken = asyncio.Event()
        self._gone = asyncio.Event()
        self._begun = False

    async def receive(self) -> Message:
        if not self._begun:
            self._begun = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Returns when the client's connection has taken it, so that nothing piles up for one that reads slowly."""
        self._taken.clear()
        self._link.send(Kind.RESPONSE, self.number, _message_facts(message), message.get("body", b""))
        if not self._gone.is_set():
            await self._taken.wait()

    def proceed(self, *, gone: bool) -> None:
        if gone:
            self._gone.set()
        self._taken.set()


def _scope_facts(scope: Scope) -> dict[str, Any]:
    return {name: scope[name] for name in _TEXTS if name in scope} | {
        "client": scope.get("client"),
        "server": scope.get("server"),
        "query": scope["query_string"].decode("latin-1"),
        "headers": _texts(scope["headers"]),
    }


def _scope(facts: Mapping[str, Any]) -> Scope:
    return {name: facts[name] for name in _TEXTS if name in facts} | {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "client": facts["client"] and tuple(facts["client"]),
        "server": facts["server"] and tuple(facts["server"]),
        "query_string": facts["query"].encode("latin-1"),
        "headers": _pairs(facts["headers"]),
    }


def _message_facts(message: Message) -> dict[str, Any]:
    if message["type"] == "http.response.start":
        return {"type": message["type"], "status": message["status"], "headers": _texts(message.get("headers", ()))}
    return {"type": message["type"], "more_body": message.get("more_body", False)}


def _message(frame: Frame) -> Message:
    facts = dict(frame.facts)
    if "headers" in facts:
        return facts | {"headers": _pairs(facts["headers"])}
    return facts | {"body": bytes(frame.payload)}


def _texts(pairs: Any) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in pairs]


def _pairs(texts: Any) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in texts]
