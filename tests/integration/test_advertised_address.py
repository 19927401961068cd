"""A leader can tell workers to join at another address; workers do so."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from multiworld import World, WorldManager
from multiworld_serving.common.config.addresses import Address
from multiworld_serving.common.config.sources import load
from multiworld_serving.common.wire.join import WORLD_BACKEND, JoinOffer, JoinRequest
from multiworld_serving.workers.compute.engine import Engine
from multiworld_serving.workers.leader_connection import LeaderConnection, WorkerProcess
from multiworld_serving.workers.leader_order import LeaderOrder
from multiworld_serving.workers.observability.metrics import WorkerMetrics
from multiworld_serving.workers.settings import WorkerSettings
from tests.integration.proxy import Proxy
from tests.unit.edges.edge_parts import unused_edges

WAIT_S = 60.0


@asynccontextmanager
async def member_of(port: int) -> AsyncIterator[None]:
    """A worker's connection to the leader at this port, while the block lasts."""
    settings = load(WorkerSettings, {"leader": f"127.0.0.1:{port}", "advertise_host": "gpu7"})
    engine, stop = Engine(torch.device("cpu")), asyncio.Event()
    async with WorldManager(verify_collectives=False) as manager:
        worker = WorkerProcess(settings, engine, stop, LeaderOrder(), WorkerMetrics(), unused_edges())
        tie = LeaderConnection(worker, manager, Address("127.0.0.1", port))
        task = asyncio.create_task(tie.run())
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait({task}, timeout=WAIT_S)
            engine.close()


async def test_worker_joins_at_the_advertised_address() -> None:
    formed: asyncio.Future[World] = asyncio.get_running_loop().create_future()
    asked: list[JoinRequest] = []

    def settle(forming: asyncio.Task[World]) -> None:
        if not formed.done():
            formed.set_result(forming.result())

    async with WorldManager(verify_collectives=False, shared_memory_bytes=0) as leader:
        port = leader.listen()
        relay = Proxy("127.0.0.1", port)

        async def offer(question: str, host: str) -> bytes:
            asked.append(JoinRequest.from_json(question))
            task = asyncio.create_task(leader.initialize_world("w", 0, 2, WORLD_BACKEND, port=port, generation=1))
            task.add_done_callback(settle)
            return JoinOffer("w", 1, address=f"127.0.0.1:{relay.port}").to_json().encode()

        leader.answer("127.0.0.1", port, offer)
        try:
            async with member_of(port), asyncio.timeout(WAIT_S):
                assert isinstance(await formed, World)
                assert relay.connections >= 2, "the control connection and the peer connection"
                assert asked[0].host == "gpu7"
                leader.remove_world("w")
        finally:
            await relay.close()
