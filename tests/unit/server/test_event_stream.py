"""GET /events over ASGI: ends when the client disconnects or reads nothing."""

from __future__ import annotations

import asyncio
import logging

import pytest
from starlette.types import Message

from multiworld_serving.server.api import event_stream
from multiworld_serving.server.api.event_stream import EventStream
from multiworld_serving.server.observability.event_feed import EventFeed
from multiworld_serving.server.observability.frontend_metrics import FrontendMetrics
from tests.unit.server.frontend_app import ColourPredictor


class Reader:
    """One end of an ASGI connection. Takes `takes` messages, then none."""

    def __init__(self, takes: int) -> None:
        self.taken: list[Message] = []
        self.gone = asyncio.Event()
        self.has_three = asyncio.Event()
        self._takes = takes

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if len(self.taken) >= self._takes:
            await asyncio.Event().wait()
        self.taken.append(message)
        if len(self.taken) == 3:
            self.has_three.set()


async def test_stream_starts_with_status_and_ends_when_the_client_disconnects() -> None:
    feed, reader = EventFeed(FrontendMetrics().requests), Reader(takes=100)
    stream = asyncio.create_task(EventStream(feed, ColourPredictor(), 0)({}, reader.receive, reader.send))
    async with asyncio.timeout(30):
        await reader.has_three.wait()
        reader.gone.set()
        await stream
    headers = dict(reader.taken[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers
    assert b"event: status" in reader.taken[1]["body"]
    assert reader.taken[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_client_is_disconnected_when_it_reads_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_stream, "_STALLED_S", 0.01)
    feed, reader = EventFeed(FrontendMetrics().requests), Reader(takes=1)
    async with asyncio.timeout(30):
        with caplog.at_level(logging.WARNING):
            await EventStream(feed, ColourPredictor(), 0)({}, reader.receive, reader.send)
    assert "disconnecting a client of /events" in caplog.text
    assert not feed._subscriptions
