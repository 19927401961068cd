"""A feed of 64 workers for pictures of the status page: 64 processes would need more memory and cores than most machines have.

It loads the real status page, and replaces its EventSource by one that receives the data of this script.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.resources import files
from typing import Any

from playwright import sync_api as playwright

from multiworld_serving.server.observability.event_feed import Event, Point
from multiworld_serving.server.observability.incidents import Incident
from multiworld_serving.server.snapshots import (
    FailureSnapshot,
    FrontendSnapshot,
    LeaderSnapshot,
    PipelineSnapshot,
    ReplicaSnapshot,
    StageSnapshot,
)

URL = "http://status.example"
_PAGE = files("multiworld_serving.server.api") / "status_page"
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "jpg": "image/jpeg"}
_SOURCE = """
window.EventSource = class extends EventTarget { constructor() { super(); this.readyState = 1; window.feed = this; } };
window.tell = (kind, content) => window.feed.dispatchEvent(new MessageEvent(kind, { data: JSON.stringify(content) }));
"""
_BATCHES_PER_S = (6.0, 14.0)
_BROKEN = frozenset({(2, 5), (3, 14)})


@contextmanager
def fed_page(browser: playwright.Browser, **context: Any) -> Iterator[playwright.Page]:
    """The real page with a feed of 64 workers that has run for two minutes."""
    page = browser.new_page(**context)
    page.clock.install(time=time.time())
    page.add_init_script(_SOURCE)
    page.route(f"{URL}/**", _answer)
    page.goto(f"{URL}/")
    page.wait_for_function("window.feed")
    _feed(page, stages=4, replicas=16, seconds=120)
    try:
        yield page
    finally:
        page.close()


def _answer(route: playwright.Route) -> None:
    path = route.request.url.removeprefix(URL)
    if path == "/" and "text/html" not in route.request.headers.get("accept", ""):
        listing = {"model": "resnet152", "endpoints": {"GET /v2": "", "POST /predict": "classify an image"}}
        route.fulfill(content_type="application/json", body=json.dumps(listing))
    elif path.startswith("/v2/"):
        metadata = {"parameters": {"input_datatypes": "UINT8,FP32,BYTES"}, "inputs": []}
        route.fulfill(content_type="application/json", body=json.dumps(metadata))
    else:
        name = "index.html" if path == "/" else path.rpartition("/")[2]
        route.fulfill(content_type=_TYPES[name.rpartition(".")[2]], body=(_PAGE / name).read_bytes())


def _latencies(chance: random.Random) -> tuple[float, float, float]:
    """Median, 99th percentile and slowest, in milliseconds."""
    return chance.gauss(74, 3), chance.gauss(130, 9), chance.gauss(180, 9)


def _feed(page: playwright.Page, *, stages: int, replicas: int, seconds: int) -> None:
    chance = random.Random(1)
    now_s = time.time()
    failed_s = now_s + seconds - 9
    snapshot = _snapshot(stages, replicas, failed_s)
    quiet = [Point(now_s - 180 + second, 0, 0, 0, None, None, None) for second in range(60)]
    busy = [Point(now_s - 120 + second, chance.uniform(900, 1100), 0, 0, *_latencies(chance)) for second in range(120)]
    _tell(page, "status", asdict(snapshot))
    _tell(page, "points", [asdict(point) for point in quiet + busy])
    for second in range(1, seconds + 1):
        snapshot = replace(snapshot, stages=tuple(_advance(stage, chance) for stage in snapshot.stages))
        page.clock.run_for(1000)
        _tell(page, "status", asdict(snapshot))
        point = Point(now_s + second, chance.uniform(950, 1050), 0, 0, *_latencies(chance))
        _tell(page, "points", [asdict(point)])
    incident = Incident(failed_s, "s2.r5", "gpu-2-5", "exit: it ended the connection", 2, 7, 0, 0, failed_s + 1)
    _tell(page, "incident", asdict(incident))
    for number, (stage, slot) in enumerate(sorted(_BROKEN)):
        event = Event(number + 1, failed_s + number, "broken", stage, slot, f"gpu-{stage}-{slot}", 1, "exit")
        _tell(page, "event", asdict(event))


def _tell(page: playwright.Page, kind: str, content: Mapping[str, Any] | list[dict[str, Any]]) -> None:
    page.evaluate("([kind, content]) => tell(kind, content)", [kind, content])


def _snapshot(stages: int, replicas: int, failed_s: float) -> PipelineSnapshot:
    def replica(stage: int, slot: int) -> ReplicaSnapshot:
        host = f"node-{(stage * replicas + slot) // 8}.rack-1"
        made = ReplicaSnapshot(
            slot, "ready", f"s{stage}.r{slot}", 1, f"gpu-{stage}-{slot}", host, 4000 + slot, f"cuda:{slot % 8}"
        )
        if (stage, slot) not in _BROKEN:
            return made
        return replace(made, state="broken", last_failure=FailureSnapshot("exit", "it ended the connection", failed_s))

    return PipelineSnapshot(
        model="resnet152",
        version="IMAGENET1K_V2",
        ready=True,
        draining=False,
        uptime_s=86_400 * 3 + 7200,
        queue_depth=12,
        requests_in_flight=88,
        stages=tuple(
            StageSnapshot(
                stage, (f"layer{stage}.0", f"layer{stage}.9"), tuple(map(replica, [stage] * replicas, range(replicas)))
            )
            for stage in range(stages)
        ),
        leader="leader-0",
        leaders=tuple(
            LeaderSnapshot(f"10.0.0.{n}:8001", "ready", f"leader-{n}", f"head-{n}", 1, "v", 6, 44) for n in range(2)
        ),
        frontends=tuple(FrontendSnapshot(f"frontend-{n}", f"head-{n}", 1, 40 + n, 29) for n in range(3)),
    )


def _advance(stage: StageSnapshot, chance: random.Random) -> StageSnapshot:
    def one(replica: ReplicaSnapshot) -> ReplicaSnapshot:
        if replica.state != "ready":
            return replica
        done = replica.batches_done + round(chance.uniform(*_BATCHES_PER_S))
        return replace(replica, batches_done=done, in_flight=chance.randint(0, 2))

    return replace(stage, replicas=tuple(map(one, stage.replicas)))
