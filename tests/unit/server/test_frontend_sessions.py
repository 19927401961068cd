"""Frontends of a leader, over real worlds: the links of one side meet the sessions of the other; only the pipeline is fake."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pydantic import SecretStr
from torch import Tensor

from multiworld import AskError, WorldManager, ask
from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.wire.join import RELEASE
from multiworld_serving.server.administration import (
    Desired,
)
from multiworld_serving.server.errors import DrainingError, RequestRejected
from multiworld_serving.server.frontends.leader_link import LeaderLink
from multiworld_serving.server.frontends.leader_pool import LeaderPool
from multiworld_serving.server.frontends.link import LinkLostError
from multiworld_serving.server.frontends.messages import Predict
from multiworld_serving.server.frontends.scrape import scrape_service
from multiworld_serving.server.frontends.sessions import FrontendSessions
from multiworld_serving.server.leader import Leader
from multiworld_serving.server.leader_settings import LeaderSettings
from multiworld_serving.server.observability.frontend_metrics import FrontendMetrics
from multiworld_serving.server.observability.leader_metrics import LeaderMetrics
from multiworld_serving.server.pipeline.batches import Relays
from multiworld_serving.server.pipeline.requests import PendingRequest
from multiworld_serving.server.predictor import ImageSizes, ModelVersion, Prediction, RestartStep
from multiworld_serving.server.settings import FrontendSettings
from multiworld_serving.server.snapshots import PipelineSnapshot
from tests.unit.edges.edge_parts import unused_edges
from tests.unit.server.fake_leaders import open_request
from tests.unit.server.image_model import image_classifier
from tests.waiting import until

SECRET = "a-secret-of-this-test"
MODEL = image_classifier("m", "v1", ("a", "b", "c"), ImageSizes(18, 16))
IMAGE = torch.arange(3 * 16 * 16, dtype=torch.int32).to(torch.uint8).view(3, 16, 16)
STEPS = [
    RestartStep("local-0", "s0.r0", "restarting", 1, 1),
    RestartStep("local-0", "s0.r0", "restarted", 1, 1, 0.5, 1.5),
]


class FakeLeader:
    """The pipeline: says how bright the channels of an image are. Can be told to wait."""

    def __init__(self) -> None:
        self.manager = WorldManager(secret=SECRET, verify_collectives=False)
        self.join_port = self.manager.listen("127.0.0.1", 0)
        self.inform_frontends: Callable[[], Awaitable[None]]
        self.version = ModelVersion(1, "v1")
        self.desired = self.served = Desired(0, self.version)
        self.obstacle = ""
        self.ready = True
        self.closed: RequestRejected | None = None
        self.proceed: asyncio.Event | None = None
        self.got: list[tuple[float, str]] = []
        self.cancelled = 0
        self.driver = SimpleNamespace(requests=self, batches=SimpleNamespace(relays=Relays()))
        self.serving = self.operations = self
        self.tasks: dict[PendingRequest, asyncio.Task[None]] = {}

    def begin(self, pending: PendingRequest, rows: int) -> None:
        self.got.append((pending.deadline_s - time.monotonic(), pending.request_id))
        self.tasks[pending] = asyncio.create_task(self._predict(pending))

    def cancel(self, pending: PendingRequest) -> None:
        self.tasks.pop(pending).cancel()
        self.cancelled += 1

    def report_lost(self) -> None:
        pass

    async def _predict(self, pending: PendingRequest) -> None:
        if self.proceed is not None:
            await self.proceed.wait()
        assert isinstance(pending.input, Tensor)
        means = pending.input.float().mean(dim=(2, 3))
        pending.on_outcome(Prediction(means, "m", "v1", 0.1, 0.2, 0.3, 1, ("w",)))
        del self.tasks[pending]

    def snapshot(self) -> PipelineSnapshot:
        return PipelineSnapshot("m", "v1", self.ready, self.closed is not None, 1.0, 0, len(self.got), ())

    async def restart_workers(self) -> AsyncGenerator[RestartStep, None]:
        for step in STEPS:
            yield step
            if self.proceed is not None:
                await self.proceed.wait()


class Service:
    """A leader and its frontends, each with a pool, in one process."""

    def __init__(self) -> None:
        self.leader = FakeLeader()
        self.metrics = LeaderMetrics()
        self.port = self.leader.join_port
        leader = cast(Leader, self.leader)
        settings = LeaderSettings(name="leader-0", local_token=SecretStr(SECRET))
        self.sessions = FrontendSessions(settings, MODEL, leader, self.metrics)
        self.leader.inform_frontends = self.sessions.inform
        self.leader.manager.answer("127.0.0.1", self.port, self.sessions.answer)
        self.links: dict[str, LeaderLink] = {}
        self._running: list[asyncio.Task[None]] = []

    def settings(self, name: str = "frontend-0", secret: str = SECRET, leaders: str = "") -> FrontendSettings:
        leader = leaders or f"127.0.0.1:{self.port}"
        return FrontendSettings(leader=leader, name=name, token=SecretStr(secret), join_timeout_s=10)

    async def frontend(self, name: str = "frontend-0") -> LeaderPool:
        """Start a frontend and wait until it is connected."""
        settings = self.settings(name)
        pool = LeaderPool(5.0, FrontendMetrics(), lambda _: None, unused_edges())
        link = self.links[name] = LeaderLink(Address("127.0.0.1", self.port), settings, pool)
        pool.links.append(link)
        self._running.append(asyncio.create_task(link.run()))
        await until(lambda: link.state is not None)
        return pool

    async def stop_frontend(self, number: int = 0) -> None:
        task = self._running.pop(number)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        while self._running:
            await self.stop_frontend()
        await self.sessions.close()
        await self.leader.manager.aclose()


@asynccontextmanager
async def running() -> AsyncIterator[Service]:
    service = Service()
    try:
        async with asyncio.timeout(60):
            yield service
    finally:
        await service.close()


async def predict(pool: LeaderPool, timeout_s: float = 30.0) -> Prediction:
    return await pool.predict(IMAGE[None], deadline_s=time.monotonic() + timeout_s, request_id="mine")


# -- joining -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("protocol", "older"), [(0, "frontend"), (99, "leader")])
async def test_join_request_of_another_protocol_is_refused_with_what_to_upgrade(
    protocol: int, older: str, caplog: pytest.LogCaptureFixture
) -> None:
    question = {"frontend": "frontend-0", "protocol": protocol, "release": "0.0.1", "of another protocol": []}
    async with running() as service:
        for _ in range(3):
            with pytest.raises(AskError) as refusal:
                await ask("127.0.0.1", service.port, json.dumps(question), secret=SECRET.encode())
    text = str(refusal.value)
    assert (
        f"frontend 'frontend-0' has release 0.0.1 with protocol {protocol}, and this leader release {RELEASE}" in text
    )
    assert f"upgrade this {older} (upgrade one leader first, then the frontends, then the other leaders)" in text
    lines = [record.getMessage() for record in caplog.records if "with protocol" in record.getMessage()]
    assert len(lines) == 1, "a process that asks again and again fills no log"
    assert "upgrade this" in lines[0]


async def test_frontend_ends_when_its_only_leader_does_not_take_its_token() -> None:
    async with running() as service:
        settings = service.settings(secret="another")
        pool = LeaderPool(1.0, FrontendMetrics(), lambda _: None, unused_edges())
        link = LeaderLink(settings.leaders[0], settings, pool)
        with pytest.raises(UserError, match="rejects this frontend's token"):
            await link.run()


async def test_frontend_with_the_same_name_replaces_the_former() -> None:
    async with running() as service:
        former = await service.frontend()
        service.leader.proceed = asyncio.Event()
        waiting = asyncio.create_task(service.links["frontend-0"].connected().call(REQUEST, PIXELS, timeout_s=30))
        await until(lambda: service.leader.got)
        [session] = service.sessions._sessions
        # The former one would join again and again: it is as good as dead.
        former_task = service._running[0]
        link = service.links["frontend-0"]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(link, "_ask", asyncio.Event().wait)
            await service.frontend()
            with pytest.raises(LinkLostError, match="same name"):
                await waiting
            await until(lambda: session not in service.sessions._sessions)
            await until(lambda: service.leader.cancelled == 1)
            assert len(service.sessions._sessions) == 1
            assert not former.ready
            assert not former_task.done()
            former_task.cancel()


# -- requests ------------------------------------------------------------------------------------------------------------------

REQUEST = Predict("mine", 30.0)
PIXELS = IMAGE.numpy().tobytes()


# -- draining ------------------------------------------------------------------------------------------------------------------


async def test_leader_that_drains_waits_for_the_requests_that_need_it() -> None:
    async with running() as service:
        pool = await service.frontend()
        async with open_request(pool):
            service.leader.closed = DrainingError("stopping")
            draining = asyncio.create_task(service.sessions.inform())
            await until(lambda: not any(link.usable for link in pool.links))
            await asyncio.sleep(0.05)
            assert not draining.done()
            await predict(pool)
        await draining


async def test_leader_that_drains_does_not_wait_for_a_frontend_that_is_lost() -> None:
    async with running() as service:
        pool = await service.frontend()
        async with open_request(pool):
            service.leader.closed = DrainingError("stopping")
            draining = asyncio.create_task(service.sessions.inform())
            await until(lambda: not any(link.usable for link in pool.links))
            await service.stop_frontend()
            await draining


# -- metrics -------------------------------------------------------------------------------------------------------------------


async def test_metrics_are_served_without_those_of_a_process_that_does_not_reply(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiworld_serving.server.frontends.sessions._SCRAPE_S", 0.05)
    async with running() as service:
        pool, other = await service.frontend("a"), await service.frontend("b")
        service.links["b"]._link._receive = lambda received: None  # type: ignore[union-attr]
        assert other.ready
        text = (await scrape_service("a", [pool], pool.metrics, tmp_path / "missing")).decode()
        assert 'process="leader-0"' in text
        assert 'process="b"' not in text
    text = (await scrape_service("a", [pool], pool.metrics)).decode()
    assert 'process="a"' in text
    assert 'process="leader-0"' not in text


# -- operations ----------------------------------------------------------------------------------------------------------------


async def test_operations_do_not_wait_for_a_frontend_that_never_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiworld_serving.server.frontends.sessions._INFORM_S", 0.05)
    async with running() as service:
        await service.frontend("a")
        await service.frontend("b")
        service.links["b"]._link._receive = lambda received: None  # type: ignore[union-attr]
        await service.sessions.inform()
        assert len(service.sessions._sessions) == 2, "it stays connected"
