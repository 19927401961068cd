"""What it costs when many workers join one leader."""

import asyncio
import sys
import time
from types import FrameType, SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from pydantic import SecretStr

from multiworld_serving.common.wire.join import JoinRequest
from multiworld_serving.models.bundle.nodes import BATCH
from multiworld_serving.server.leader import Leader
from multiworld_serving.server.observability.leader_metrics import LeaderMetrics
from multiworld_serving.server.predictor import ModelVersion, ServedModel
from multiworld_serving.server.replicas import registry
from multiworld_serving.server.replicas.worker import Worker
from multiworld_serving.server.settings import ServeSettings
from multiworld_serving.server.versions.version_table import VersionPlan

STAGES = 4
JOIN_S = 0.005


class Link:
    """A link without a world. Its worker is ready immediately."""

    def __init__(self, worker: Worker, plans: object, on_state: Any, on_batch: object) -> None:
        self.worker = worker
        self._on_state = on_state

    async def run(self, *_: object, **__: object) -> None:
        for state in ("loading", "warming", "checking", "ready"):
            self.worker.state = cast(Any, state)
            self._on_state(self)
        await asyncio.Event().wait()

    def close(self) -> None: ...


def plan() -> VersionPlan:
    stages = [
        SimpleNamespace(
            spec=SimpleNamespace(index=index, blocks=(), part=f"p{index}", dimensions={BATCH: (1, 32)}),
            weights=SimpleNamespace(size=0),
        )
        for index in range(STAGES)
    ]
    return VersionPlan(ModelVersion(1, "v1"), cast(Any, tuple(stages)))


class LineCounter:
    """Counts the lines of Python that run between `start` and `stop`: how much work that is, on any machine."""

    def __init__(self) -> None:
        self.lines = 0

    def start(self) -> None:
        self.lines = 0
        sys.settrace(self._trace)

    def stop(self) -> int:
        sys.settrace(None)
        return self.lines

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        self.lines += event == "line"
        return self._trace


async def test_work_for_a_join_does_not_grow_with_the_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)  # the event loop's clock, too
    monkeypatch.setattr(registry, "WorkerLink", Link)
    settings = ServeSettings(token=SecretStr("a-secret-of-this-test"), join_port=0, stages=STAGES, replicas=100)
    leader = Leader(cast(ServedModel, SimpleNamespace(name="m")), plan(), settings, LeaderMetrics())
    sent = []
    monkeypatch.setattr(leader._frontends, "state_changed", lambda: sent.append(msgspec.json.encode(leader.snapshot())))

    async def join(numbers: range) -> None:
        nonlocal now_s
        for number in numbers:
            leader.offer_worker(JoinRequest(f"w{number}", "cpu", f"host-{number % 50}", 1), "127.0.0.1")
            for _ in range(4):
                await asyncio.sleep(0)
            now_s += JOIN_S

    counter = LineCounter()

    async def lines_of(numbers: range) -> int:
        counter.start()
        await join(numbers)
        return counter.stop()

    await join(range(100))
    few = await lines_of(range(100, 200))
    await join(range(200, 900))
    many = await lines_of(range(900, 1000))
    assert len(list(leader._registry.placement.ready())) == 1000
    assert len(sent) > 20
    assert many < 1.3 * few, (few, many)
    for task in leader._registry._tasks:
        task.cancel()
    leader._registry.stop()
    leader._notices.cancel()
    leader.driver.close()
