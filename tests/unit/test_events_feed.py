"""What the status page is told: the differences between snapshots, for a bounded number of readers who keep up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from server.errors import OverloadedError
from server.events_feed import EventsFeed, Subscription
from server.metrics import Metrics
from server.predictor import FailureSnapshot, PipelineSnapshot, ReplicaSnapshot, ReplicaState, StageSnapshot

KILLED = FailureSnapshot("exit", "it ended the connection", 1000.0)


def replica(state: ReplicaState, epoch: int = 1, **more: Any) -> ReplicaSnapshot:
    return ReplicaSnapshot(0, state, **{"world": "s0.r0", "epoch": epoch, "worker": "local-0", **more})


def snapshot(*replicas: ReplicaSnapshot, draining: bool = False) -> PipelineSnapshot:
    return PipelineSnapshot("m", "v", True, draining, 1.0, 0, 0, (StageSnapshot(0, ("stem",), replicas),))


def read(subscription: Subscription) -> list[tuple[str, Any]]:
    """What waits for this reader now."""
    messages = b"".join(subscription._waiting).decode().split("\n\n")
    subscription._waiting.clear()
    fields = [dict(line.split(": ", 1) for line in message.splitlines()) for message in messages if message]
    return [(each["event"], json.loads(each["data"])) for each in fields if "event" in each]


def happened(*snapshots: PipelineSnapshot) -> list[tuple[str, int, str]]:
    """The feed of these snapshots, one after the other: what, epoch and detail."""
    feed = EventsFeed(Metrics())
    with feed.subscribe(snapshots[0]) as subscription:
        for each in snapshots:
            feed.observe(each)
        return [(e["what"], e["epoch"], e["detail"]) for kind, e in read(subscription) if kind == "event"]


async def test_a_killed_worker_is_told_as_broken_and_rejoined() -> None:
    told = happened(
        snapshot(replica("absent", 0, world=None, worker=None)),
        snapshot(replica("joining")),
        snapshot(replica("loading")),
        snapshot(replica("ready")),
        snapshot(replica("ready", in_flight=2)),
        snapshot(replica("broken", last_failure=KILLED)),
        snapshot(replica("joining", 2, last_failure=KILLED)),
        snapshot(replica("ready", 2, last_failure=KILLED)),
    )
    assert told == [
        ("joining", 1, ""),
        ("serves", 1, ""),
        ("broken", 1, "exit: it ended the connection"),
        ("joining", 2, ""),
        ("rejoined", 2, ""),
    ]


async def test_a_worker_that_goes_is_told_as_left_and_not_as_broken() -> None:
    told = happened(
        snapshot(replica("ready", 2, last_failure=KILLED)),
        snapshot(replica("draining", 2, last_failure=KILLED)),
        snapshot(replica("broken", 2, last_failure=KILLED)),
    )
    assert [what for what, _, _ in told] == ["rejoined", "draining", "left"]


async def test_a_spare_that_steps_in_is_told_as_taking_over() -> None:
    spare = replica("ready", 1, world="spare0", worker="local-4")
    told = happened(snapshot(replica("ready")), snapshot(replica("broken", last_failure=KILLED)), snapshot(spare))
    assert [what for what, _, _ in told] == ["serves", "broken", "takes_over"]


async def test_the_tick_tells_rates_latencies_and_reroutes() -> None:
    metrics = Metrics()
    feed = EventsFeed(metrics)
    now = snapshot(replica("ready"))
    with feed.subscribe(now) as subscription:
        read(subscription)
        for duration_s in (0.010, 0.020, 0.900):
            metrics.request_started()
            metrics.request_finished(
                model="m", version="v", protocol="predict", code=200, reason="ok", duration_s=duration_s
            )
        metrics.rerouted(0, 0.001)
        metrics.rerouted(0, 0.001)
        feed._tick(now)
        told = read(subscription)
    points = [content for kind, content in told if kind == "points"]
    assert (points[0][0]["p50_ms"], points[0][0]["failed"]) == (20.0, 0)
    assert points[0][0]["answered"] > 0
    assert [(e["what"], e["detail"]) for kind, e in told if kind == "event"] == [
        ("rerouted", "2 batches"),
        ("serves", ""),
    ]
    assert "status" in [kind for kind, _ in told]


async def test_a_reader_that_comes_back_gets_what_it_missed() -> None:
    feed = EventsFeed(Metrics())
    for epoch in range(1, 6):
        feed.observe(snapshot(replica("ready", epoch)))

    def ids(last_id: int) -> list[int]:
        with feed.subscribe(snapshot(), last_id) as subscription:
            return [content["id"] for kind, content in read(subscription) if kind == "event"]

    assert ids(3) == [4, 5]
    assert ids(0) == [1, 2, 3, 4, 5]
    assert ids(99) == [1, 2, 3, 4, 5], "the leader that told 99 events was another one"


async def test_a_slow_reader_is_dropped_and_the_others_are_not() -> None:
    feed = EventsFeed(Metrics())
    with feed.subscribe(snapshot()) as slow, feed.subscribe(snapshot()) as quick:
        for _ in range(100):
            feed._tick(snapshot())
            read(quick)
        messages = [message async for message in slow]
        assert len(messages) <= 64
        feed._tick(snapshot())
        assert read(quick)


async def test_readers_are_bounded_and_places_are_given_back() -> None:
    feed = EventsFeed(Metrics())
    readers = [feed.subscribe(snapshot()) for _ in range(32)]
    for reader in readers:
        reader.__enter__()
    with pytest.raises(OverloadedError), feed.subscribe(snapshot()):
        pass
    readers[0].__exit__(None, None, None)
    with feed.subscribe(snapshot()):
        pass


async def test_readers_are_told_the_end_when_the_service_drains() -> None:
    feed = EventsFeed(Metrics())
    with feed.subscribe(snapshot()) as subscription:
        feed.observe(snapshot(draining=True))
        async with asyncio.timeout(10):
            messages = [message async for message in subscription]
    assert b'"draining":true' in messages[-1]
