"""Which leader a worker joins and moves to, leaders that refuse it, and stages that take too long to build or compute."""

import asyncio
import json
import logging
import os
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pydantic import SecretStr

from multiworld import Cause, World, WorldManager, texts
from multiworld_serving.common.config.addresses import MAX_NAME_CHARS, Address
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.settings.worker import WorkerSettings
from multiworld_serving.common.wire.join import JoinOffer
from multiworld_serving.common.wire.link import Link
from multiworld_serving.common.wire.protocol import Received
from multiworld_serving.common.wire.work import WORKER_PROTOCOL, Leaving
from multiworld_serving.workers import leader_connection
from multiworld_serving.workers.compute.engine import Engine
from multiworld_serving.workers.leader_connection import LeaderConnection, StuckError
from multiworld_serving.workers.observability.metrics import WorkerMetrics
from multiworld_serving.workers.session import Session
from tests.unit.edges.edge_parts import unused_edges
from tests.waiting import Gate, until

SECRET = "a-secret-of-this-test"


class FakeLeader:
    """Offers a world to each worker that asks, unless it has another answer.

    Attributes:
        answer: instead of a world.
        asked: the requests.
        world: that of the worker that has joined.
    """

    def __init__(self, secret: str = SECRET) -> None:
        self.manager = WorldManager(secret=secret, verify_collectives=False)
        self.port = self.manager.listen()
        self.manager.answer("127.0.0.1", self.port, self._answer)
        self.answer: JoinOffer | None = None
        self.asked: list[dict[str, Any]] = []
        self.world: World | None = None
        self.link: Link | None = None
        self._joining: list[asyncio.Task[None]] = []

    async def _answer(self, question: str, _host: str) -> bytes:
        self.asked.append(json.loads(question))
        if self.answer is not None:
            return self.answer.to_json().encode()
        offer = JoinOffer("s0.r0", len(self._joining) + 1)
        self._joining.append(asyncio.create_task(self._serve(offer)))
        return offer.to_json().encode()

    async def _serve(self, offer: JoinOffer) -> None:
        self.world = await offer.form(self.manager, 0, Address("127.0.0.1", self.port), 60.0)
        self.link = Link(self.world, 1, WORKER_PROTOCOL, self._receive)
        await self.link.run()
        self.world = self.link = None

    def _receive(self, received: Received) -> None:
        assert isinstance(received.body, Leaving)
        assert self.world is not None
        self.world.close()

    async def close(self) -> None:
        await self.manager.aclose()
        await asyncio.gather(*self._joining, return_exceptions=True)


Leaders = tuple[FakeLeader, FakeLeader]
Tasks = list[asyncio.Task[None]]


@pytest.fixture
async def leaders() -> AsyncIterator[Leaders]:
    made = FakeLeader(), FakeLeader()
    yield made
    for leader in made:
        await leader.close()


@pytest.fixture
async def stranger() -> AsyncIterator[FakeLeader]:
    """A leader with another token."""
    made = FakeLeader("another-secret")
    yield made
    await made.close()


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine(torch.device("cpu"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_connection, "_MAX_BACKOFF_S", 0.01)
    monkeypatch.setattr(leader_connection, "_LOOK_S", 0.01)


@pytest.fixture
async def connections() -> AsyncIterator[list[asyncio.Task[None]]]:
    running: list[asyncio.Task[None]] = []
    yield running
    for each in running:
        each.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def connection(engine: Engine, *ports: int) -> LeaderConnection:
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
    settings = WorkerSettings(leader=addresses, token=SecretStr(SECRET), heartbeat_timeout_s=10)
    manager = WorldManager(secret=SECRET, verify_collectives=False)
    return LeaderConnection(settings, engine, unused_edges(), manager, WorkerMetrics(), asyncio.Event())


def joined(leader: FakeLeader) -> World | None:
    return leader.world if leader.link is not None else None


# -- which leader --------------------------------------------------------------------------------------------------------------


async def test_worker_joins_the_next_leader_when_the_first_is_lost_and_returns_when_that_takes_it(
    engine: Engine, leaders: Leaders, connections: Tasks
) -> None:
    first, second = leaders
    worker = connection(engine, first.port, second.port)
    connections.append(asyncio.create_task(worker.run()))
    await until(lambda: joined(first))
    assert not second.asked
    assert first.world is not None
    first.answer = JoinOffer("", 0, wait_ms=1)
    first.world.fail(Cause.HANG, 0, "it is frozen")
    await until(lambda: joined(second))
    assert [each["serves"] for each in second.asked] == [False]
    asked = len(first.asked)
    await asyncio.sleep(0.05)
    assert len(first.asked) == asked, "it has nothing to serve yet, so it does not move"
    assert worker._session is not None
    worker._session.serving = True
    await until(lambda: len(first.asked) > asked + 2)
    assert all(each["serves"] for each in first.asked[asked:])
    assert joined(second)
    first.answer = None
    await until(lambda: joined(first) and not joined(second))


async def test_worker_moves_to_any_leader_when_its_own_one_asks_for_it(
    engine: Engine, leaders: Leaders, connections: Tasks
) -> None:
    first, second = leaders
    worker = connection(engine, first.port, second.port)
    connections.append(asyncio.create_task(worker.run()))
    await until(lambda: joined(first) and worker._session is not None)  # the worker may be ready later than its leader
    assert worker._session is not None
    worker._session.serving = True
    await asyncio.sleep(0.05)
    assert not second.asked
    assert first.link is not None
    first.link.send(Leaving())
    await until(lambda: joined(second) and not joined(first))


async def test_leader_that_cannot_serve_gets_the_worker_when_no_other_one_takes_it(
    engine: Engine, leaders: Leaders, connections: Tasks
) -> None:
    for leader in leaders:
        leader.answer = JoinOffer("", 0, wait_ms=1, elsewhere=True)
    first, second = leaders
    connections.append(asyncio.create_task(connection(engine, first.port, second.port).run()))
    await until(lambda: len(first.asked) >= 2)
    assert [each["alone"] for each in first.asked[:2]] == [False, True]
    assert not any(each["alone"] for each in second.asked)
    second.answer = None
    await until(lambda: joined(second))


# -- refusals ------------------------------------------------------------------------------------------------------------------


def test_default_name_is_valid_on_a_host_with_a_long_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "h" * 64)
    name = WorkerSettings(leader="127.0.0.1:1", token=SecretStr(SECRET)).name
    assert re.fullmatch(rf"[!-~]{{1,{MAX_NAME_CHARS}}}", name)
    assert name.endswith(f"-{os.getpid()}")
    assert MAX_NAME_CHARS == texts.MAX_NAME_CHARS


async def test_worker_ends_when_its_only_leader_refuses_its_token(stranger: FakeLeader, engine: Engine) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(UserError, match="rejects this worker's token"):
            await connection(engine, stranger.port).run()


async def test_worker_of_several_leaders_continues_when_one_refuses_its_token(
    stranger: FakeLeader,
    engine: Engine,
    caplog: pytest.LogCaptureFixture,
    connections: Tasks,
) -> None:
    caplog.set_level(logging.INFO)
    connections.append(asyncio.create_task(connection(engine, stranger.port, 1).run()))
    await until(lambda: connections[0].done() or "rejects this worker's token" in caplog.text)
    assert not connections[0].done()


async def test_worker_says_that_it_waits_when_nothing_listens(
    engine: Engine, caplog: pytest.LogCaptureFixture, connections: Tasks
) -> None:
    caplog.set_level(logging.INFO)
    connections.append(asyncio.create_task(connection(engine, 1).run()))
    await until(lambda: connections[0].done() or "it answers when it has loaded its model" in caplog.text)
    assert not connections[0].done()


async def test_worker_logs_once_when_its_leader_offers_no_world_several_times(
    engine: Engine,
    leaders: Leaders,
    caplog: pytest.LogCaptureFixture,
    connections: Tasks,
) -> None:
    leader = leaders[0]
    leader.answer = JoinOffer("", 0)
    connections.append(asyncio.create_task(connection(engine, leader.port).run()))
    await until(lambda: connections[0].done() or "asks this worker to wait" in caplog.text)
    before = len(leader.asked)
    await until(lambda: connections[0].done() or len(leader.asked) > before + 3)
    assert not connections[0].done()
    assert before >= 3
    assert caplog.text.count("asks this worker to wait") == 1


# -- stages that hang ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_batch", [True, False], ids=["computed", "made"])
async def test_building_a_stage_has_a_longer_limit_than_computing_a_batch(
    engine: Engine, is_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_connection, "_BATCH_STUCK_S", 0.1)
    monkeypatch.setattr(leader_connection, "arm_exit_timer", lambda seconds: None)
    session, work = cast(Session, SimpleNamespace(device_failed=False)), Gate()
    working = asyncio.create_task(engine.run(session, work, is_batch=is_batch))
    await work.until_begun()
    looking = asyncio.create_task(connection(engine, 1)._raise_if_stuck(session))
    done, _ = await asyncio.wait({looking}, timeout=60 if is_batch else 0.5)
    assert bool(done) == is_batch
    work.open()
    await working
    if is_batch:
        with pytest.raises(StuckError, match="computing"):
            await looking
    else:
        await looking
