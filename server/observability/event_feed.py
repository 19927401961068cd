"""The data of the status page: a snapshot of the pipeline every second, and events as they happen.

Events are derived from the difference between two snapshots; the leader passes one after each change of a replica's state.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

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
    stage: int | None
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


class Subscription:
    """Messages queued for one subscriber. Ends if the subscriber is too slow or the service stops."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._available = asyncio.Event()
        self._ended = False

    def put(self, message: bytes) -> None:
        """Queue a message. If too many are queued, end the subscription: its data would be outdated."""
        if len(self._waiting) >= _MAX_WAITING:
            self.end()
        if not self._ended:
            self._waiting.append(message)
            self._available.set()

    def end(self) -> None:
        """Accept no further messages."""
        self._ended = True
        self._available.set()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._ended:
                return
            self._available.clear()
            try:
                async with asyncio.timeout(_KEEP_ALIVE_S):
                    await self._available.wait()
            except TimeoutError:
                yield b": still here\n\n"


class EventFeed:
    """Derives events from snapshots and sends them to all subscribers."""

    def __init__(self, requests: RequestOutcomes) -> None:
        self._requests = requests
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._points: deque[Point] = deque(maxlen=_MAX_POINTS)
        self._subscriptions: set[Subscription] = set()
        self._replicas: dict[tuple[int, int], ReplicaSnapshot] = {}
        self._rerouted: dict[int, int] = {}
        self._leaders: dict[str, bool] = {}
        """Whether each leader was ready, by address."""
        self._leader: str | None = None
        self._statuses = requests.statuses()
        self._tick_s = time.monotonic()
        self._version: str | None = None
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
        next_id = self._next_id
        if self._version not in (None, snapshot.version):
            self._emit("version_changed", None, detail=f"{self._version} to {snapshot.version}")
        self._version = snapshot.version
        self._compare_leaders(snapshot)
        comparable, self._leader = self._leader in (None, snapshot.leader), snapshot.leader
        for stage in snapshot.stages:
            for replica in stage.replicas:
                before = self._replicas.get((stage.index, replica.slot))
                self._replicas[stage.index, replica.slot] = replica
                if comparable:  # another leader has other worlds with the same workers
                    self._compare(stage.index, before, replica)
        if snapshot.draining or self._next_id > next_id:
            self._broadcast("status", asdict(snapshot))
        if snapshot.draining:
            self._end_all()

    @contextmanager
    def subscribe(self, snapshot: PipelineSnapshot, last_id: int = 0) -> Iterator[Subscription]:
        """Subscribe while the block runs. First come a snapshot, past points, and the events after event `last_id`.

        Raises:
            OverloadedError: too many subscribers.
        """
        if len(self._subscriptions) >= _MAX_SUBSCRIBERS:
            raise OverloadedError(
                f"{_MAX_SUBSCRIBERS} clients follow the events already; close one, or use GET /status"
            )
        subscription = Subscription()
        subscription.put(b"retry: 2000\n\n" + _message("status", asdict(snapshot)))
        subscription.put(_message("points", [asdict(point) for point in self._points]))
        missed = [event for event in self._events if event.id > last_id or last_id >= self._next_id]
        for event in missed[-_MAX_WAITING // 2 :]:
            subscription.put(_message("event", asdict(event), event.id))
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    async def _run(self, snapshot: Callable[[], PipelineSnapshot]) -> None:
        failed = False
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                self._tick(snapshot())
            except Exception:
                if not failed:
                    logger.exception("the event feed failed on a tick; it continues and does not log further failures")
                failed = True

    def _tick(self, snapshot: PipelineSnapshot) -> None:
        statuses, now_s = self._requests.statuses(), time.monotonic()
        point = _point(statuses - self._statuses, now_s - self._tick_s, self._requests.take_durations())
        for stage in snapshot.stages:
            moved = stage.rerouted - self._rerouted.get(stage.index, 0)
            self._rerouted[stage.index] = stage.rerouted
            if moved > 0:  # a leader that was restarted counts from 0
                self._emit("rerouted", stage.index, detail=f"{moved} {'batch' if moved == 1 else 'batches'}")
        self._statuses, self._tick_s = statuses, now_s
        self._points.append(point)
        self._broadcast("status", asdict(snapshot))
        self._broadcast("points", [asdict(point)])
        self.observe(snapshot)

    def _compare_leaders(self, snapshot: PipelineSnapshot) -> None:
        for leader in snapshot.leaders:
            ready = leader.state == "ready"
            before = self._leaders.get(leader.address)
            self._leaders[leader.address] = ready
            if ready and before is not True:
                self._emit("leader_ready", None, detail=leader.name or leader.address)
            elif before and not ready:
                self._emit("leader_lost", None, detail=f"{leader.name or leader.address} is {leader.state}")

    def _compare(self, stage: int, before: ReplicaSnapshot | None, now: ReplicaSnapshot) -> None:
        if before is not None and (before.state, before.generation, before.world) == (
            now.state,
            now.generation,
            now.world,
        ):
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
            self._emit(what, stage, now, detail)

    def _emit(
        self, what: EventType, stage: int | None, replica: ReplicaSnapshot | None = None, detail: str = ""
    ) -> None:
        if replica is None:
            event = Event(self._next_id, time.time(), what, stage, detail=detail)
        else:
            where = (replica.slot, replica.worker, replica.generation)
            event = Event(self._next_id, time.time(), what, stage, *where, detail)
        self._next_id += 1
        self._events.append(event)
        self._broadcast("event", asdict(event), event.id)

    def _broadcast(self, kind: str, content: object, event_id: int | None = None) -> None:
        if not self._subscriptions:
            return
        message = _message(kind, content, event_id)
        for subscription in self._subscriptions:
            subscription.put(message)

    def _end_all(self) -> None:
        for subscription in self._subscriptions:
            subscription.end()


def _message(kind: str, content: object, event_id: int | None = None) -> bytes:
    """Format a server-sent event."""
    number = "" if event_id is None else f"id: {event_id}\n"
    return f"event: {kind}\n{number}data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


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
