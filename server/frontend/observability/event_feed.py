"""The data of the status page: each second a snapshot of the pipeline, rates and latencies, and the events since the last second.

Events are derived from the difference between two snapshots; the frontend passes one after each change of a replica's state.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import StreamingResponse

from multiworld_serving.common.observers import suppress_errors
from multiworld_serving.common.service.errors import OverloadedError
from multiworld_serving.common.service.snapshots import PipelineSnapshot, ReplicaSnapshot
from multiworld_serving.server.frontend.observability.request_records import ModelRequests

_MESSAGE_INTERVAL_S = 1.0
_MAX_POINTS = 300
_MAX_EVENTS = 100
_MAX_FOLLOWERS = 32
_STALLED_S = 10.0
"""A client that has read nothing for this long does not count as a follower: it must not keep others out."""

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # otherwise nginx buffers the events
}


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        id: increases by one.
        what: joining, serves, rejoined, takes_over, draining, broken, left, rerouted, version_changed, leader_ready or leader_lost.
        stage: None = not specific to a stage.
        detail: cause and details of a failure, number of batches, or the old and new version.
    """

    id: int
    at_unix_s: float
    what: str
    stage: int | None = None
    replica: int | None = None
    worker: str | None = None
    generation: int = 0
    detail: str = ""


@dataclass(frozen=True)
class Point:
    """One second of service: rates per second and latencies in milliseconds; None = no responses.

    Latencies are those of answered requests, from the first byte of the request to the last byte of the response, with the time that a
    request waited until it was sent to another leader. `slowest_ms` is apart, because the 99th percentile of fewer than a hundred
    responses is not the slowest one.
    """

    at_unix_s: float
    answered: float
    refused: float
    failed: float
    p50_ms: float | None
    p99_ms: float | None
    slowest_ms: float | None


class EventFeed:
    """Derives events from snapshots, and sends them to the followers."""

    def __init__(self, requests: ModelRequests) -> None:
        self.observe = suppress_errors(self._observe)
        self.tick = suppress_errors(self._tick)
        self._requests = requests
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._points: deque[Point] = deque(maxlen=_MAX_POINTS)
        self._last: PipelineSnapshot | None = None
        self._tick_s = time.monotonic()
        self._next_id = 1
        self._followers: dict[object, float] = {}
        """When each follower has taken its last message."""

    def _observe(self, snapshot: PipelineSnapshot) -> None:
        """Add events for the differences to the last snapshot."""
        last, self._last = self._last, snapshot
        if last is not None and last.version != snapshot.version:
            self._emit("version_changed", detail=f"{last.version} to {snapshot.version}")
        ready_before = {each.address for each in last.leaders if each.available} if last else set()
        for leader in snapshot.leaders:
            name = leader.name or leader.address
            if leader.available and leader.address not in ready_before:
                self._emit("leader_ready", detail=name)
            elif not leader.available and leader.address in ready_before:
                self._emit("leader_lost", detail=f"{name} is {leader.state}")
        stages = {stage.index: stage for stage in last.stages} if last else {}
        same_leader = last is None or last.leader in (None, snapshot.leader)  # another one has other worlds
        for stage in snapshot.stages:
            before = stages.get(stage.index)
            replicas = {each.slot: each for each in before.replicas} if before else {}
            for replica in stage.replicas if same_leader else ():
                self._compare(stage.index, replicas.get(replica.slot), replica)
            if before and same_leader and (moved := stage.rerouted - before.rerouted) > 0:
                self._emit("rerouted", stage=stage.index, detail=f"{moved} {'batch' if moved == 1 else 'batches'}")

    def response(self, snapshot: Callable[[], PipelineSnapshot]) -> StreamingResponse:
        """The response of GET /events: server-sent events until the client disconnects or the service drains.

        Raises:
            OverloadedError: too many clients follow.
        """
        now_s = time.monotonic()
        if sum(now_s - taken_s < _STALLED_S for taken_s in self._followers.values()) >= _MAX_FOLLOWERS:
            raise OverloadedError(f"{_MAX_FOLLOWERS} clients follow the events already; close one, or use GET /status")
        return StreamingResponse(self.follow(snapshot), headers=_HEADERS)

    async def follow(self, snapshot: Callable[[], PipelineSnapshot]) -> AsyncGenerator[bytes, None]:
        """Messages every second until the service drains. The first ones contain all events and points that are kept."""
        event_id, point_s, key = 0, 0.0, object()
        try:
            while True:
                self._followers[key] = time.monotonic()
                now = snapshot()
                events = [event for event in self._events if event.id > event_id]
                points = [point for point in self._points if point.at_unix_s > point_s]
                text = _message("status", now)
                if points:
                    point_s = points[-1].at_unix_s
                    text += _message("points", points)
                for event in events:
                    event_id = event.id
                    text += _message("event", event)
                yield text
                if now.draining:  # clients go to another frontend
                    return
                await asyncio.sleep(_MESSAGE_INTERVAL_S)
        finally:
            self._followers.pop(key, None)

    def _tick(self, snapshot: PipelineSnapshot) -> None:
        """Once a second."""
        now_s = time.monotonic()
        self._points.append(_point(self._requests.take_recent(), now_s - self._tick_s))
        self._tick_s = now_s
        self._observe(snapshot)

    def _compare(self, stage: int, before: ReplicaSnapshot | None, now: ReplicaSnapshot) -> None:
        if before and (before.state, before.generation, before.world) == (now.state, now.generation, now.world):
            return
        what, detail = "", ""
        if now.state == "broken" and now.last_failure is not None:
            what, detail = "broken", f"{now.last_failure.cause}: {now.last_failure.detail}"
        elif now.state == "ready":
            own = f"s{stage}.r{now.slot}"
            what = "takes_over" if now.world != own else "serves" if now.generation == 1 else "rejoined"
        elif now.state in ("joining", "draining", "left"):
            what = now.state
        if what and now.world is not None:
            where = {"replica": now.slot, "worker": now.worker, "generation": now.generation}
            self._emit(what, stage=stage, detail=detail, **where)

    def _emit(self, what: str, **fields: Any) -> None:
        self._events.append(Event(self._next_id, time.time(), what, **fields))
        self._next_id += 1


def _message(kind: str, content: object) -> bytes:
    """Format a server-sent event."""
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(content) + b"\n\n"


def _point(ended: list[tuple[int, float]], seconds: float) -> Point:
    statuses = Counter(status // 100 for status, _ in ended)
    took_s = sorted(duration_s for status, duration_s in ended if status == 200)

    def quantile_ms(share: float) -> float | None:
        return round(1000 * took_s[int(share * (len(took_s) - 1))], 1) if took_s else None

    return Point(
        at_unix_s=time.time(),
        answered=round(statuses[2] / seconds, 1),
        refused=round(statuses[4] / seconds, 1),
        failed=round(statuses[5] / seconds, 1),
        p50_ms=quantile_ms(0.5),
        p99_ms=quantile_ms(0.99),
        slowest_ms=quantile_ms(1),
    )
