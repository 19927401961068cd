"""The data of the status page: a snapshot of the pipeline every second, and events as they happen.

Events are derived from the difference between two snapshots; the leader passes one after each change of a replica's state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from multiworld_serving.common.observers import suppress_errors
from multiworld_serving.server.errors import OverloadedError
from multiworld_serving.server.observability.request_outcomes import RequestOutcomes
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
_MAX_SUBSCRIBERS = 32
_MAX_WAITING = 64
"""Messages queued for one subscriber: about a minute of them."""
_KEEP_ALIVE_S = 15.0
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
    """Derives events from snapshots and sends them to all subscribers."""

    def __init__(self, requests: RequestOutcomes) -> None:
        self._requests = requests
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._points: deque[Point] = deque(maxlen=_MAX_POINTS)
        self._subscriptions: set[asyncio.Queue[bytes]] = set()
        """Messages that wait for each subscriber; an empty one is the end."""
        self._last: PipelineSnapshot | None = None
        self._rerouted: dict[tuple[str | None, int], int] = {}
        self._statuses = requests.statuses()
        self._tick_s = time.monotonic()
        self._next_id = 1

    @asynccontextmanager
    async def running(self, snapshot: Callable[[], PipelineSnapshot]) -> AsyncIterator[None]:
        """Send a snapshot every second while the block runs."""
        task = asyncio.create_task(self._run(snapshot))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._end_all()

    def observe(self, snapshot: PipelineSnapshot) -> None:
        """Emit events for the differences to the last snapshot, and the snapshot itself if there are any."""
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
        if last is None or last.leader in (
            None,
            snapshot.leader,
        ):  # another leader has other worlds with the same workers
            before = (
                {(stage.index, each.slot): each for stage in last.stages for each in stage.replicas} if last else {}
            )
            for stage in snapshot.stages:
                for replica in stage.replicas:
                    self._compare(stage.index, before.get((stage.index, replica.slot)), replica)
        if snapshot.draining or self._next_id > next_id:
            self._broadcast("status", snapshot)
        if snapshot.draining:
            self._end_all()

    @contextmanager
    def subscribe(self, snapshot: PipelineSnapshot, last_id: int = 0) -> Iterator[asyncio.Queue[bytes]]:
        """The messages while the block runs. First come a snapshot, past points, and the events after event `last_id`.

        An empty message is the end: the subscriber is too slow, or the service stops.

        Raises:
            OverloadedError: too many subscribers.
        """
        if len(self._subscriptions) >= _MAX_SUBSCRIBERS:
            raise OverloadedError(
                f"{_MAX_SUBSCRIBERS} clients follow the events already; close one, or use GET /status"
            )
        messages: asyncio.Queue[bytes] = asyncio.Queue()
        messages.put_nowait(b"retry: 2000\n\n" + _message("status", snapshot))
        messages.put_nowait(_message("points", tuple(self._points)))
        missed = [event for event in self._events if event.id > last_id or last_id >= self._next_id]
        for event in missed[-_MAX_WAITING // 2 :]:
            messages.put_nowait(_message("event", event, event.id))
        self._subscriptions.add(messages)
        try:
            yield messages
        finally:
            self._subscriptions.discard(messages)

    async def _run(self, snapshot: Callable[[], PipelineSnapshot]) -> None:
        tick = suppress_errors(lambda: self._tick(snapshot()))
        while True:
            await asyncio.sleep(_TICK_S)
            tick()

    def _tick(self, snapshot: PipelineSnapshot) -> None:
        statuses, now_s = self._requests.statuses(), time.monotonic()
        point = _point(statuses - self._statuses, now_s - self._tick_s, self._requests.take_durations())
        for stage in snapshot.stages:
            counter = snapshot.leader, stage.index
            moved = stage.rerouted - self._rerouted.get(counter, 0)
            self._rerouted[counter] = stage.rerouted
            if moved > 0:  # a leader that was restarted counts from 0
                self._emit("rerouted", stage=stage.index, detail=f"{moved} {'batch' if moved == 1 else 'batches'}")
        self._statuses, self._tick_s = statuses, now_s
        self._points.append(point)
        self._broadcast("status", snapshot)
        self._broadcast("points", (point,))
        self.observe(snapshot)

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
        event = Event(self._next_id, time.time(), what, **fields)
        self._next_id += 1
        self._events.append(event)
        self._broadcast("event", event, event.id)

    def _broadcast(self, kind: str, content: object, event_id: int | None = None) -> None:
        if not self._subscriptions:
            return
        message = _message(kind, content, event_id)
        for messages in tuple(self._subscriptions):
            if messages.qsize() < _MAX_WAITING:
                messages.put_nowait(message)
            else:  # its data would be outdated
                self._subscriptions.discard(messages)
                messages.put_nowait(b"")

    def _end_all(self) -> None:
        for messages in self._subscriptions:
            messages.put_nowait(b"")


class EventStream(Response):
    """The response of GET /events: server-sent events until the client disconnects, is too slow, or the service stops.

    Starlette's StreamingResponse would wait for a slow client forever.

    Args:
        last_id: id of the last event that the client received.
    """

    def __init__(self, feed: EventFeed, snapshot: PipelineSnapshot, last_id: int) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._feed = feed
        self._snapshot = snapshot
        self._last_id = last_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.subscribe(self._snapshot, self._last_id) as messages:
            gone = asyncio.create_task(_end_when_gone(receive, messages))
            try:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                while message := await _next(messages):
                    async with asyncio.timeout(_STALLED_S):
                        await send({"type": "http.response.body", "body": message, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except TimeoutError:
                logger.warning("disconnecting a client of /events that read nothing for %g s", _STALLED_S)
            finally:
                gone.cancel()


async def _next(messages: asyncio.Queue[bytes]) -> bytes:
    try:
        return await asyncio.wait_for(messages.get(), _KEEP_ALIVE_S)
    except TimeoutError:
        return b": still here\n\n"


async def _end_when_gone(receive: Receive, messages: asyncio.Queue[bytes]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    messages.put_nowait(b"")


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
