"""A leader may tell its workers to join elsewhere than they ask: they do, and say what is wrong when nobody is there."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from config import load
from config.addresses import Address
from multiworld import World, WorldManager
from tests.chaos.relay import Relay
from wire import WORLD_BACKEND, JoinOffer, JoinRequest
from workers.engine import Engine
from workers.membership import Membership
from workers.metrics import WorkerMetrics
from workers.settings import WorkerSettings

WAIT_S = 60.0


@asynccontextmanager
async def member_of(port: int) -> AsyncIterator[None]:
    """A worker's tie to the leader at that port, while the block lasts."""
    settings = load(WorkerSettings, {"leader": f"127.0.0.1:{port}", "advertise_host": "gpu7", "join_timeout_s": "0.5"})
    engine, stop = Engine(torch.device("cpu")), asyncio.Event()
    async with WorldManager(checked=False) as manager:
        tie = Membership(Address("127.0.0.1", port), settings, engine, manager, stop, WorkerMetrics())
        task = asyncio.create_task(tie.keep_serving())
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait({task}, timeout=WAIT_S)
            engine.close()


async def test_worker_joins_where_the_leader_tells_it_to() -> None:
    formed: asyncio.Future[World] = asyncio.get_running_loop().create_future()
    asked: list[JoinRequest] = []

    def settle(forming: asyncio.Task[World]) -> None:
        if not formed.done():
            formed.set_result(forming.result())

    async with WorldManager(checked=False) as leader:
        port = leader.listen()
        with Relay(f"127.0.0.1:{port}") as relay:

            async def offer(question: str, host: str) -> bytes:
                asked.append(JoinRequest.from_json(question))
                task = asyncio.create_task(leader.initialize_world("w", 0, 2, WORLD_BACKEND, port=port, epoch=1))
                task.add_done_callback(settle)
                return JoinOffer("w", 1, address=relay.address).to_json().encode()

            leader.answer("127.0.0.1", port, offer)
            async with member_of(port), asyncio.timeout(WAIT_S):
                assert isinstance(await formed, World)
                assert relay.connections >= 2, "the lifeline and the line"
                assert asked[0].host == "gpu7"
                leader.remove_world("w")


class Complaints(logging.Handler):
    """What is logged of joining in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.first: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def emit(self, record: logging.LogRecord) -> None:
        if "cannot be joined" in record.getMessage() and not self.first.done():
            self.first.set_result(record.getMessage())


async def test_worker_names_the_leaders_setting_when_nobody_is_where_it_is_told_to_join() -> None:
    complaints = Complaints()
    logger = logging.getLogger("workers.membership")
    async with WorldManager(checked=False) as leader:
        port = leader.listen()

        async def offer(question: str, host: str) -> bytes:
            return JoinOffer("w", 1, address="127.0.0.1:1").to_json().encode()

        leader.answer("127.0.0.1", port, offer)
        logger.addHandler(complaints)
        try:
            async with member_of(port), asyncio.timeout(WAIT_S):
                said = await complaints.first
        finally:
            logger.removeHandler(complaints)
    assert "Connection refused" in said
    assert "told us to join at 127.0.0.1:1: its --advertise-host must be an address that this machine reaches" in said
