"""The event feed: differences between snapshots, for followers that read at their own speed."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from multiworld_serving.common.service.errors import OverloadedError
from multiworld_serving.common.service.snapshots import (
    FailureSnapshot,
    LeaderSnapshot,
    PipelineSnapshot,
    ReplicaSnapshot,
    ReplicaState,
)
from multiworld_serving.server.frontend.observability import event_feed
from multiworld_serving.server.frontend.observability.event_feed import EventFeed
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics
from tests.unit.server.pipelines import pipeline

KILLED = FailureSnapshot("exit", "it ended the connection", 1000.0)


def replica(state: ReplicaState, generation: int = 1, **more: Any) -> ReplicaSnapshot:
    return ReplicaSnapshot(0, state, **{"world": "s0.r0", "generation": generation, "worker": "local-0", **more})


def snapshot(*replicas: ReplicaSnapshot, draining: bool = False) -> PipelineSnapshot:
    return pipeline(replicas, draining=draining)


async def told(feed: EventFeed) -> list[tuple[str, Any]]:
    """What a client gets that follows now."""
    messages = (await anext(feed.follow(snapshot))).decode().split("\n\n")
    fields = [dict(line.split(": ", 1) for line in message.splitlines()) for message in messages if message]
    return [(each["event"], json.loads(each["data"])) for each in fields]


async def happened(*snapshots: PipelineSnapshot) -> list[tuple[str, int, str]]:
    """The events of a feed of these successive snapshots: type, generation and detail."""
    feed = EventFeed(FrontendMetrics().requests.of_model("m"))
    for each in snapshots:
        feed.observe(each)
    return [(e["what"], e["generation"], e["detail"]) for kind, e in await told(feed) if kind == "event"]


async def test_feed_emits_the_change_of_the_version() -> None:
    before = snapshot(replica("ready"))
    after = replace(before, version="v2")
    assert (await happened(before, before, after, after))[1:] == [("version_changed", 0, f"{before.version} to v2")]


async def test_feed_that_fails_never_ends_the_link_that_it_observes(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = EventFeed(FrontendMetrics().requests.of_model("m"))
    monkeypatch.setattr(feed, "_compare", None)
    feed.observe(snapshot(replica("ready")))
    monkeypatch.undo()
    feed.observe(snapshot(replica("broken", last_failure=KILLED)))
    assert [event["what"] for kind, event in await told(feed) if kind == "event"] == ["broken"]


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


async def test_tick_reports_rates_latencies_and_reroutes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: 1000.0, time=lambda: 1000.0)
    monkeypatch.setattr("multiworld_serving.server.frontend.observability.request_records.time", clock)
    requests = FrontendMetrics().requests
    counts = requests.of_model("m")
    feed = EventFeed(counts)
    now = snapshot(replica("ready"))
    scope: dict[str, Any] = {"method": "POST", "path": "/predict", "headers": []}
    for duration_s in (0.010, 0.020, 0.900):
        record = requests.begin(scope, "v", "predict", counts)
        record.status, record.started_s = 200, 1000.0 - duration_s
        requests.end(scope, record)
    feed.tick(now)
    feed.tick(replace(now, stages=(replace(now.stages[0], rerouted=2),)))
    feed.tick(replace(now, stages=(replace(now.stages[0], rerouted=1),)))  # a leader that was restarted counts from 0
    messages = await told(feed)
    points = [content for kind, content in messages if kind == "points"]
    assert points[0][0]["p50_ms"] == pytest.approx(20.0, abs=5)
    assert points[0][0]["slowest_ms"] == pytest.approx(900.0, abs=5)
    assert points[0][0]["answered"] > points[0][0]["failed"] == 0
    events = [(e["what"], e["detail"]) for kind, e in messages if kind == "event"]
    assert events == [("serves", ""), ("rerouted", "2 batches")]
    assert "status" in [kind for kind, _ in messages]


async def test_feed_reports_leaders_and_does_not_compare_the_views_of_two_leaders() -> None:
    first, second = LeaderSnapshot("a:1", "ready", "leader-0"), LeaderSnapshot("b:1", "ready", "leader-1")
    before = replace(snapshot(replica("ready", 1)), leader="leader-0", leaders=(first, second))
    lost = replace(first, state="unreachable")
    after = replace(snapshot(replica("ready", 5)), leader="leader-1", leaders=(lost, second))
    events = await happened(before, after, after, replace(after, leaders=(first, second)))
    assert [(what, detail) for what, _, detail in events] == [
        *(("leader_ready", "leader-0"), ("leader_ready", "leader-1"), ("serves", "")),
        *(("leader_lost", "leader-0 is unreachable"), ("leader_ready", "leader-0")),
    ]


async def test_follower_gets_each_point_and_event_once_until_the_service_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_feed, "_MESSAGE_INTERVAL_S", 0.0)
    feed, shown = EventFeed(FrontendMetrics().requests.of_model("m")), [snapshot(), snapshot(), snapshot(draining=True)]
    feed.tick(snapshot(replica("ready")))
    messages = []
    async for message in feed.follow(lambda: shown.pop(0)):
        messages.append(message.decode())
        if len(messages) == 1:
            feed.tick(snapshot(replica("left")))
    kinds = [[line for line in message.splitlines() if line.startswith("event")] for message in messages]
    everything = ["event: status", "event: points", "event: event"]
    assert kinds == [everything, everything, ["event: status"]]
    assert '"what":"serves"' in messages[0]
    assert '"what":"left"' in messages[1]


async def test_events_are_a_stream_for_a_limited_number_of_clients_that_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "_STALLED_S", 3600.0)  # clients of a slow machine read
    feed = EventFeed(FrontendMetrics().requests.of_model("m"))
    response = feed.response(snapshot)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers
    followers = [feed.follow(snapshot) for _ in range(32)]
    for each in followers:
        await anext(each)
    with pytest.raises(OverloadedError, match="32 clients follow the events"):
        feed.response(snapshot)
    monkeypatch.setattr(event_feed, "_STALLED_S", 0.0)
    feed.response(snapshot)
    monkeypatch.setattr(event_feed, "_STALLED_S", 3600.0)
    await followers[0].aclose()
    feed.response(snapshot)
