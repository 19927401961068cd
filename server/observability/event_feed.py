"""The data of the status page: a snapshot of the pipeline every second, and events as they happen.

Events are derived from the difference between two snapshots; the leader passes one after each change of a replica's state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from multiworld_serving.common.observers import suppress_errors
from multiworld_serving.server.errors import OverloadedError
from multiworld_serving.server.observability.requests import Requests
from multiworld_serving.server.snapshots import PipelineSnapshot, ReplicaSnapshot

logger = logging.getLogger(__name__)

EventType = Literal[
    "joining",
    "serves",
    "rejoined",
    "takes_over",
    "draining",
    "broken",
    "left",
    "rerouted",
    "version_changed",
    "leader_ready",
    "leader_lost",
]

_TICK_S = 1.0
_MAX_POINTS = 300
_MAX_EVENTS = 100
_MAX_FOLLOWERS = 32
_STALLED_S = 10.0
"""A client that reads nothing for this long is disconnected."""

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # otherwise nginx buffers the events
}


@dataclass(frozen=True)
class Event:
    """One event.

    Attributes:
        id: increases by one; a subscriber that reconnects sends the last one it received.
        stage: None = not specific to a stage.
        detail: cause and details of a failure, number of batches, or the old and new version.
    """

    id: int
    at_unix_s: float
    what: EventType
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
    """Derives events from snapshots. Each follower reads at its own speed; a slow one misses snapshots and old events.

    Attributes:
        followers: number of clients that follow.
    """

    def __init__(self, requests: Requests) -> None:
        self.followers = 0
        self._requests = requests
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._points: deque[Point] = deque(maxlen=_MAX_POINTS)
        self._last: PipelineSnapshot | None = None
        self._statuses = requests.statuses()
        self._tick_s = time.monotonic()
        self._next_id = 1
        self._changed = asyncio.Event()
        self._ended = False

    @asynccontextmanager
    async def running(self, snapshot: Callable[[], PipelineSnapshot]) -> AsyncIterator[None]:
        """Send a snapshot every second while the block runs."""
        self.observe(snapshot())
        task = asyncio.create_task(self._run(snapshot))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._ended = True
            self._wake()

    def observe(self, snapshot: PipelineSnapshot) -> None:
        """Emit events for the differences to the last snapshot. Followers are woken if there are any."""
        next_id, last, self._last = self._next_id, self._last, snapshot
        if last is not None and last.version != snapshot.version:
            self._emit("version_changed", detail=f"{last.version} to {snapshot.version}")
        ready_before = {each.address for each in last.leaders if each.state == "ready"} if last else set()
        for leader in snapshot.leaders:
            name = leader.name or leader.address
            if leader.state == "ready" and leader.address not in ready_before:
                self._emit("leader_ready", detail=name)
            elif leader.state != "ready" and leader.address in ready_before:
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
        if snapshot.draining or self._next_id > next_id:
            self._wake()

    async def follow(self, last_id: int = 0) -> AsyncIterator[bytes]:
        """Messages until the service drains or stops: first a snapshot, past points, and the events after event `last_id`."""
        event_id = last_id if last_id < self._next_id else 0
        point_s, shown = 0.0, None
        yield b"retry: 2000\n\n"
        while True:
            changed, text = self._changed, b""
            ended = self._ended or (self._last is not None and self._last.draining)  # clients go to another frontend
            if self._last is not shown:
                shown = self._last
                text = _message("status", shown)
            if points := [point for point in self._points if point.at_unix_s > point_s]:
                point_s = points[-1].at_unix_s
                text += _message("points", points)
            for event in [event for event in self._events if event.id > event_id]:
                event_id = event.id
                text += _message("event", event, event.id)
            if text:
                yield text
            if ended:
                return
            await changed.wait()

    async def _run(self, snapshot: Callable[[], PipelineSnapshot]) -> None:
        tick = suppress_errors(lambda: self._tick(snapshot()))
        while True:
            await asyncio.sleep(_TICK_S)
            tick()

    def _tick(self, snapshot: PipelineSnapshot) -> None:
        statuses, now_s = self._requests.statuses(), time.monotonic()
        self._points.append(_point(statuses - self._statuses, now_s - self._tick_s, self._requests.take_durations()))
        self._statuses, self._tick_s = statuses, now_s
        self.observe(snapshot)
        self._wake()

    def _compare(self, stage: int, before: ReplicaSnapshot | None, now: ReplicaSnapshot) -> None:
        if before and (before.state, before.generation, before.world) == (now.state, now.generation, now.world):
            return
        what: EventType | None = None
        detail = ""
        if now.state == "broken" and now.last_failure is not None:
            what, detail = "broken", f"{now.last_failure.cause}: {now.last_failure.detail}"
        elif now.state == "ready":
            own = f"s{stage}.r{now.slot}"
            what = "takes_over" if now.world != own else "serves" if now.generation == 1 else "rejoined"
        elif now.state in ("joining", "draining", "left"):
            what = now.state
        if what is not None and now.world is not None:
            where = {"replica": now.slot, "worker": now.worker, "generation": now.generation}
            self._emit(what, stage=stage, detail=detail, **where)

    def _emit(self, what: EventType, **fields: Any) -> None:
        self._events.append(Event(self._next_id, time.time(), what, **fields))
        self._next_id += 1

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class EventStream(StreamingResponse):
    """The response of GET /events: server-sent events until the client disconnects, reads nothing, or the service stops.

    Args:
        last_id: id of the last event that the client received.
    Raises:
        OverloadedError: too many clients follow.
    """

    def __init__(self, feed: EventFeed, last_id: int) -> None:
        if feed.followers >= _MAX_FOLLOWERS:
            raise OverloadedError(f"{_MAX_FOLLOWERS} clients follow the events already; close one, or use GET /status")
        super().__init__(feed.follow(last_id), headers=_HEADERS)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(_STALLED_S):
                await send(message)

        self._feed.followers += 1
        try:
            await super().__call__(scope, receive, send_in_time)
        except* TimeoutError:
            logger.warning("disconnecting a client of /events that read nothing for %g s", _STALLED_S)
        finally:
            self._feed.followers -= 1


def _message(kind: str, content: object, event_id: int | None = None) -> bytes:
    """Format a server-sent event."""
    number = "" if event_id is None else f"id: {event_id}\n"
    return f"event: {kind}\n{number}data: ".encode() + msgspec.json.encode(content) + b"\n\n"


def _point(statuses: Counter[str], seconds: float, took_s: list[float]) -> Point:
    took_s.sort()

    def quantile_ms(share: float) -> float | None:
        return round(1000 * took_s[int(share * (len(took_s) - 1))], 1) if took_s else None

    return Point(
        at_unix_s=time.time(),
        answered=round(statuses["2"] / seconds, 1),
        refused=round(statuses["4"] / seconds, 1),
        failed=round(statuses["5"] / seconds, 1),
        p50_ms=quantile_ms(0.5),
        p99_ms=quantile_ms(0.99),
        slowest_ms=quantile_ms(1),
    )
