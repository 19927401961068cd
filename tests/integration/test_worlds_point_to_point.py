"""Members in separate processes form worlds, exchange messages and close them."""

import asyncio

import pytest
import torch

from multiworld import JoinError, WorldClosedError, WorldExistsError, WorldManager, WorldNotFoundError
from tests.integration.members import Spawn, form

BIG = 3_000_000  # float32: 12 MB, larger than any socket buffer

PATIENT_S = 10.0
"""Heartbeat timeout: long, because no test here is about heartbeats and the machine may be busy."""
MEMBER_SETTINGS = {"heartbeat_timeout_s": PATIENT_S}


@pytest.mark.parametrize("order", ["012", "210", "102"])
async def test_world_of_three_forms_when_members_start_in_any_order(spawn: Spawn, order: str) -> None:
    host, *others = [await spawn() for _ in range(3)]
    port = await host.do("listen")
    joining = []
    for rank in map(int, order):
        member = [host, *others][rank]
        joining.append(member.start("join", world="w", rank=rank, size=3, port=port))
        # Before the world has formed only the host's state is visible; for the others the next command is sufficient.
        await member.do("threads")
    assert await asyncio.gather(*joining) == [1, 1, 1]
    everybody = [host, *others]
    for source in range(3):
        for target in range(3):
            if source != target:
                coming = everybody[target].start("recv", world="w", src=source)
                await everybody[source].do("send", world="w", dst=target, value=float(10 * source + target))
                assert await coming == [float(10 * source + target)]


async def test_member_joins_by_host_name(spawn: Spawn, manager: WorldManager) -> None:
    """`localhost` may resolve to ::1 first, where nothing listens: the next address is tried."""
    port = manager.listen("127.0.0.1")
    peer = await spawn()
    joining = peer.start("join", world="w", rank=1, size=2, port=port, addr="localhost")
    await manager.initialize_world("w", 0, 2, addr="127.0.0.1", port=port)
    await joining


async def test_name_of_a_closed_world_is_free_with_the_next_generation(spawn: Spawn, manager: WorldManager) -> None:
    port = manager.listen()
    peer = await spawn()
    for generation in (1, 2, 3):
        assert await form("w", port, manager, peer) == generation
        manager.remove_world("w")
        assert (await peer.do("event", kind="broken", world="w"))[3:] == ["left", 0]
        await peer.do("remove", world="w")
        await peer.do("forget_events")


async def test_stale_generation_is_refused_and_a_later_one_waits(spawn: Spawn, manager: WorldManager) -> None:
    port = manager.listen()
    stale, early = await spawn(), await spawn()
    waiting = early.start("join", world="w", rank=1, size=2, port=port, generation=8)
    refused = stale.start("join", world="w", rank=1, size=2, port=port, generation=6)
    forming = asyncio.create_task(manager.initialize_world("w", 0, 2, port=port, generation=7))
    with pytest.raises(JoinError, match=r"generation 6 .* the current one is 7"):
        await refused
    await early.do("threads")
    assert not waiting.done()
    forming.cancel()
    await asyncio.gather(forming, return_exceptions=True)
    assert (await manager.initialize_world("w", 0, 2, port=port)).generation == 8
    assert await waiting == 8


async def test_name_in_use_is_refused_without_affecting_its_world(spawn: Spawn, manager: WorldManager) -> None:
    port = manager.listen()
    peer = await spawn()
    await form("w", port, manager, peer)
    with pytest.raises(WorldExistsError):
        await manager.initialize_world("w", 0, 2, port=port)
    with pytest.raises(WorldNotFoundError):
        manager.remove_world("another")
    coming = peer.start("recv", world="w", src=0)
    await manager.communicator.send(torch.ones(4), 1, "w")
    assert await coming == [1.0]


async def test_operation_raises_that_the_world_is_closed(manager: WorldManager) -> None:
    world = await manager.initialize_world("w", 0, 1, port=manager.listen())
    world.close()
    with pytest.raises(WorldClosedError, match="closed by this process"):
        await manager.communicator.barrier("w")
    with pytest.raises(ValueError, match="rank 1 is not a peer"):
        await manager.communicator.send(torch.ones(1), 1, "w")
