"""What a worker makes of a leader that refuses it, and of a stage that is computed or made for too long."""

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from pydantic import SecretStr

from config import UserError
from config.addresses import Address
from multiworld import AskError, WorldManager
from workers.engine import Engine
from workers.membership import Membership, StuckError
from workers.metrics import WorkerMetrics
from workers.session import Session
from workers.settings import WorkerSettings

SECRET = "a-secret-of-this-test"


@pytest.fixture
async def leader() -> AsyncIterator[int]:
    """The port of one who knows another token."""
    async with WorldManager(secret="another-secret") as manager:
        port = manager.listen()

        async def nothing(question: str, host: str) -> bytes:
            return b""

        manager.answer("127.0.0.1", port, nothing)
        yield port


def membership(port: int, engine: Engine, *others: str) -> Membership:
    settings = WorkerSettings(leader=",".join((f"127.0.0.1:{port}", *others)), token=SecretStr(SECRET))
    return Membership(
        Address("127.0.0.1", port), settings, engine, WorldManager(secret=SECRET), asyncio.Event(), WorkerMetrics()
    )


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine(torch.device("cpu"))
    yield made
    made.close()


async def test_worker_ends_when_its_only_leader_does_not_take_its_token(leader: int, engine: Engine) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(UserError, match="does not take our token"):
            await membership(leader, engine).keep_serving()


async def test_worker_of_several_leaders_goes_on_when_one_does_not_take_its_token(
    leader: int, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    tie = membership(leader, engine, "127.0.0.1:1")
    with pytest.raises(AskError, match="does not take our token"):
        await tie._ask()
    serving = asyncio.create_task(tie.keep_serving())
    async with asyncio.timeout(60):
        while "does not take our token" not in caplog.text:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
    assert not serving.done()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


@pytest.mark.parametrize("is_batch", [True, False], ids=["computed", "made"])
async def test_stage_that_is_made_has_more_time_than_one_that_computes_a_batch(
    engine: Engine, is_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.membership._STUCK_S", 0.1)
    monkeypatch.setattr("workers.membership.end_within", lambda seconds: None)
    begun, proceed = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert proceed.wait(60)

    place = engine.place()
    working = asyncio.create_task(engine.run(place, work, is_batch=is_batch))
    await asyncio.to_thread(begun.wait, 60)
    tie, session = membership(1, engine), cast(Session, SimpleNamespace(out_of_memory=False, place=place))
    looking = asyncio.create_task(tie._raise_if_stuck(session))
    done, _ = await asyncio.wait({looking}, timeout=60 if is_batch else 0.5)
    assert bool(done) == is_batch
    proceed.set()
    await working
    if is_batch:
        with pytest.raises(StuckError, match="computing"):
            await looking
    else:
        await looking
