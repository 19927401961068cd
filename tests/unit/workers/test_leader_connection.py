"""A worker whose leader refuses it, and stages that take too long to build or compute."""

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from pydantic import SecretStr

from multiworld import WorldManager, texts
from multiworld_serving.common.config.addresses import MAX_NAME_CHARS, Address
from multiworld_serving.common.config.errors import UserError
from multiworld_serving.common.settings.worker import WorkerSettings
from multiworld_serving.common.wire.join import JoinOffer
from multiworld_serving.workers.compute.engine import Engine
from multiworld_serving.workers.leader_connection import LeaderConnection, StuckError, WorkerProcess
from multiworld_serving.workers.leader_order import LeaderOrder
from multiworld_serving.workers.observability.metrics import WorkerMetrics
from multiworld_serving.workers.session import Session
from tests.unit.edges.edge_parts import unused_edges
from tests.waiting import Gate, until

SECRET = "a-secret-of-this-test"


@pytest.fixture
async def leader() -> AsyncIterator[int]:
    """The port of a leader with another token."""
    async with WorldManager(secret="another-secret") as manager:
        port = manager.listen()

        async def nothing(question: str, host: str) -> bytes:
            return b""

        manager.answer("127.0.0.1", port, nothing)
        yield port


def connection(port: int, engine: Engine, *others: str) -> LeaderConnection:
    settings = WorkerSettings(leader=",".join((f"127.0.0.1:{port}", *others)), token=SecretStr(SECRET))
    worker = WorkerProcess(settings, engine, asyncio.Event(), LeaderOrder(), WorkerMetrics(), unused_edges())
    return LeaderConnection(worker, WorldManager(secret=SECRET), Address("127.0.0.1", port))


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine(torch.device("cpu"))
    yield made
    made.close()


def test_default_name_is_valid_on_a_host_with_a_long_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "h" * 64)
    name = WorkerSettings(leader="127.0.0.1:1", token=SecretStr(SECRET)).name
    assert re.fullmatch(rf"[!-~]{{1,{MAX_NAME_CHARS}}}", name)
    assert name.endswith(f"-{os.getpid()}")
    assert MAX_NAME_CHARS == texts.MAX_NAME_CHARS


async def test_worker_ends_when_its_only_leader_refuses_its_token(leader: int, engine: Engine) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(UserError, match="rejects this worker's token"):
            await connection(leader, engine).run()


async def test_worker_of_several_leaders_continues_when_one_refuses_its_token(
    leader: int, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    serving = asyncio.create_task(connection(leader, engine, "127.0.0.1:1").run())
    caplog.set_level(logging.INFO)
    await until(lambda: serving.done() or "rejects this worker's token" in caplog.text)
    assert not serving.done()
    assert "when it has loaded its model" not in caplog.text
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_worker_says_that_it_waits_when_nothing_listens(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    serving = asyncio.create_task(connection(1, engine).run())
    await until(lambda: serving.done() or "which answers when it has loaded its model" in caplog.text)
    assert not serving.done()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


async def test_worker_logs_once_when_its_leader_offers_no_world_several_times(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiworld_serving.workers.leader_connection._MAX_BACKOFF_S", 0.01)
    asked: list[str] = []

    async def offer_no_world(question: str, host: str) -> bytes:
        asked.append(question)
        return JoinOffer("", 0).to_json().encode()

    async with WorldManager(secret=SECRET) as manager:
        port = manager.listen()
        manager.answer("127.0.0.1", port, offer_no_world)
        waiting = asyncio.create_task(connection(port, engine).run())
        await until(lambda: waiting.done() or "asks this worker to wait" in caplog.text)
        before = len(asked)
        await until(lambda: waiting.done() or len(asked) > before + 3)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    assert before >= 3
    assert caplog.text.count("asks this worker to wait") == 1


@pytest.mark.parametrize("is_batch", [True, False], ids=["computed", "made"])
async def test_building_a_stage_has_a_longer_limit_than_computing_a_batch(
    engine: Engine, is_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiworld_serving.workers.leader_connection._BATCH_STUCK_S", 0.1)
    monkeypatch.setattr("multiworld_serving.workers.leader_connection.arm_exit_timer", lambda seconds: None)
    session, work = cast(Session, SimpleNamespace(device_failed=False)), Gate()
    working = asyncio.create_task(engine.run(session, work, is_batch=is_batch))
    await work.until_begun()
    looking = asyncio.create_task(connection(1, engine)._raise_if_stuck(session))
    done, _ = await asyncio.wait({looking}, timeout=60 if is_batch else 0.5)
    assert bool(done) == is_batch
    work.open()
    await working
    if is_batch:
        with pytest.raises(StuckError, match="computing"):
            await looking
    else:
        await looking
