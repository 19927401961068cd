"""The event feed: differences between snapshots, for followers that read at their own speed, and GET /events over ASGI."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import Message

from multiworld_serving.server.observability import event_feed
from multiworld_serving.server.observability.event_feed import EventFeed, EventStream
from multiworld_serving.server.observability.frontend_metrics import FrontendMetrics
from multiworld_serving.server.snapshots import (
    FailureSnapshot,
    LeaderSnapshot,
    PipelineSnapshot,
    ReplicaSnapshot,
    ReplicaState,
    StageSnapshot,
)

KILLED = FailureSnapshot("exit", "it ended the connection", 1000.0)


def replica(state: ReplicaState, generation: int = 1, **more: Any) -> ReplicaSnapshot:
    return ReplicaSnapshot(0, state, **{"world": "s0.r0", "generation": generation, "worker": "local-0", **more})


def snapshot(*replicas: ReplicaSnapshot, draining: bool = False) -> PipelineSnapshot:
    return PipelineSnapshot("m", "v", True, draining, 1.0, 0, 0, (StageSnapshot(0, ("stem",), replicas),))


async def told(feed: EventFeed, last_id: int = 0) -> list[tuple[str, Any]]:
    """What a client gets that follows from now until the service stops, which is now."""
    feed._ended, ended = True, feed._ended
    messages = b"".join([part async for part in feed.follow(last_id)]).decode().split("\n\n")
    feed._ended = ended
    fields = [dict(line.split(": ", 1) for line in message.splitlines()) for message in messages if message]
    return [(each["event"], json.loads(each["data"])) for each in fields if "event" in each]


async def happened(*snapshots: PipelineSnapshot) -> list[tuple[str, int, str]]:
    """The events of a feed of these successive snapshots: type, generation and detail."""
    feed = EventFeed(FrontendMetrics().requests)
    for each in snapshots:
        feed.observe(each)
    return [(e["what"], e["generation"], e["detail"]) for kind, e in await told(feed) if kind == "event"]


async def test_feed_emits_broken_and_rejoined_when_a_worker_is_killed() -> None:
    events = await happened(
        snapshot(replica("absent", 0, world=None, worker=None)),
        snapshot(replica("joining")),
        snapshot(replica("loading")),
        snapshot(replica("ready")),
        snapshot(replica("ready", in_flight=2)),
        snapshot(replica("broken", last_failure=KILLED)),
        snapshot(replica("joining", 2, last_failure=KILLED)),
        snapshot(replica("ready", 2, last_failure=KILLED)),
    )
    assert events == [
        ("joining", 1, ""),
        ("serves", 1, ""),
        ("broken", 1, "exit: it ended the connection"),
        ("joining", 2, ""),
        ("rejoined", 2, ""),
    ]


async def test_tick_reports_rates_latencies_and_reroutes() -> None:
    requests = FrontendMetrics().requests
    requests.declare("m", "v", ("predict",))
    feed = EventFeed(requests)
    now = snapshot(replica("ready"))
    scope: dict[str, Any] = {"method": "POST", "path": "/predict", "headers": []}
    for duration_s in (0.010, 0.020, 0.900):
        record = requests.begin(scope, "v", "predict")
        record.status, record.started_s = 200, record.started_s - duration_s
        requests.end(scope, record)
    feed._tick(now)
    feed._tick(replace(now, stages=(replace(now.stages[0], rerouted=2),)))
    feed._tick(replace(now, stages=(replace(now.stages[0], rerouted=1),)))  # a leader that was restarted counts from 0
    messages = await told(feed)
    points = [content for kind, content in messages if kind == "points"]
    assert (points[0][0]["p50_ms"], points[0][0]["slowest_ms"]) == (
        pytest.approx(20.0, abs=5),
        pytest.approx(900.0, abs=5),
    )
    assert points[0][0]["answered"] > points[0][0]["failed"] == 0
    assert [(e["what"], e["detail"]) for kind, e in messages if kind == "event"] == [
        ("serves", ""),
        ("rerouted", "2 batches"),
    ]
    assert "status" in [kind for kind, _ in messages]


async def test_feed_reports_leaders_and_does_not_compare_the_views_of_two_leaders() -> None:
    feed = EventFeed(FrontendMetrics().requests)
    first, second = LeaderSnapshot("a:1", "ready", "leader-0"), LeaderSnapshot("b:1", "ready", "leader-1")
    before = replace(snapshot(replica("ready", 1)), leader="leader-0", leaders=(first, second))
    lost = replace(first, state="unreachable")
    after = replace(snapshot(replica("ready", 5)), leader="leader-1", leaders=(lost, second))
    feed.observe(before)
    last_id = feed._next_id - 1
    feed.observe(after)
    feed.observe(replace(after, leaders=(first, second)))
    events = [(e["what"], e["detail"]) for kind, e in await told(feed, last_id) if kind == "event"]
    assert events == [("leader_lost", "leader-0 is unreachable"), ("leader_ready", "leader-0")]


async def test_slow_follower_misses_old_events_and_gets_the_latest_state() -> None:
    feed = EventFeed(FrontendMetrics().requests)
    feed.observe(snapshot(replica("ready")))
    slow = feed.follow()
    await anext(slow)  # retry
    await anext(slow)
    for number in range(150):
        feed.observe(replace(snapshot(), version=str(number)))
    text = (await anext(slow)).decode()
    assert text.count("event: event") == 100
    assert text.count("event: status") == 1
    assert '"version":"149"' in text


async def test_followers_end_while_the_service_drains() -> None:
    feed = EventFeed(FrontendMetrics().requests)
    feed.observe(snapshot(draining=True))
    assert [kind for kind, _ in await told(feed)] == ["status"]
    feed.observe(snapshot(replica("ready")))  # another leader has taken over
    follower = feed.follow()
    for _ in range(2):
        await anext(follower)
    waiting = asyncio.ensure_future(anext(follower))
    await asyncio.sleep(0)
    assert not waiting.done()
    feed.observe(snapshot(replica("ready"), draining=True))
    assert b"status" in await waiting
    with pytest.raises(StopAsyncIteration):
        await anext(follower)


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
    feed.observe(snapshot(replica("ready")))
    stream = asyncio.create_task(EventStream(feed, 0)({"type": "http"}, reader.receive, reader.send))
    async with asyncio.timeout(30):
        await reader.has_three.wait()
        reader.gone.set()
        await stream
    headers = dict(reader.taken[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert b"content-length" not in headers
    assert b"event: status" in reader.taken[2]["body"]
    assert feed.followers == 0


async def test_client_is_disconnected_when_it_reads_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_feed, "_STALLED_S", 0.01)
    feed, reader = EventFeed(FrontendMetrics().requests), Reader(takes=1)
    async with asyncio.timeout(30):
        with caplog.at_level(logging.WARNING):
            await EventStream(feed, 0)({"type": "http"}, reader.receive, reader.send)
    assert "disconnecting a client of /events" in caplog.text
    assert feed.followers == 0  # the place of that client is free
