"""Worlds without a backend of c10d: messages, all_reduce and barrier go, other collectives are refused, and nobody listens but rank 0."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from multiworld import JoinError, WorldError, WorldManager


@pytest.fixture
async def managers() -> AsyncIterator[tuple[WorldManager, WorldManager]]:
    async with WorldManager(checked=False) as host, WorldManager(checked=False, bind_host="127.0.0.2") as guest:
        yield host, guest


async def form(managers: tuple[WorldManager, WorldManager], *backends: str, timeout_s: float = 30) -> None:
    host, guest = managers
    port = host.listen()
    await asyncio.gather(
        *(
            manager.initialize_world("w", rank, 2, backend, port=port, timeout=timeout_s)
            for rank, (manager, backend) in enumerate(zip((host, guest), backends, strict=True))
        )
    )


def listening() -> set[str]:
    """Local addresses of this process's network that listen, as the kernel writes them."""
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    return {columns[1] for columns in map(str.split, lines) if columns[3] == "0A"}


async def test_messages_go_both_ways_when_a_world_has_lines_alone(managers: tuple[WorldManager, WorldManager]) -> None:
    await form(managers, "lines", "lines")
    sent, received = torch.arange(1000.0), torch.empty(1000)
    for source, target in (managers, managers[::-1]):
        rank = 0 if source is managers[0] else 1
        await asyncio.gather(
            source.world("w").send(sent * (rank + 1), 1 - rank), target.world("w").recv(received, rank)
        )
        assert torch.equal(received, sent * (rank + 1))


async def test_all_reduce_and_barrier_need_no_backend(managers: tuple[WorldManager, WorldManager]) -> None:
    await form(managers, "lines", "lines")
    tensors = [torch.arange(200_000.0) * (rank + 1) for rank in range(2)]
    await asyncio.gather(
        *(
            manager.communicator.all_reduce(tensor, world_name="w")
            for manager, tensor in zip(managers, tensors, strict=True)
        )
    )
    assert all(torch.equal(tensor, torch.arange(200_000.0) * 3) for tensor in tensors)
    await asyncio.gather(*(manager.communicator.barrier("w") for manager in managers))


async def test_other_collectives_are_refused_and_the_world_goes_on_when_it_has_lines_alone(
    managers: tuple[WorldManager, WorldManager],
) -> None:
    await form(managers, "lines", "lines")
    for refused in (
        managers[0].communicator.broadcast(torch.ones(1), 0, "w"),
        managers[0].communicator.all_gather([torch.ones(1)] * 2, torch.ones(1), "w"),
    ):
        with pytest.raises(ValueError, match="has lines alone"):
            await refused
    received = torch.empty(1)
    await asyncio.gather(managers[0].world("w").send(torch.ones(1), 1), managers[1].world("w").recv(received, 0))
    assert received.item() == 1


async def test_members_say_so_when_they_were_given_different_backends(
    managers: tuple[WorldManager, WorldManager],
) -> None:
    host, guest = managers
    port = host.listen()
    hosting = asyncio.create_task(host.initialize_world("w", 0, 2, "lines", port=port))
    told = "rank 0 is unchecked with backend lines, we are unchecked with backend cpu:gloo"
    with pytest.raises(JoinError, match=told):
        await guest.initialize_world("w", 1, 2, port=port)
    (ending,) = await asyncio.gather(hosting, return_exceptions=True)
    assert isinstance(ending, WorldError), "rank 0 learns of it at once"


async def test_connections_leave_from_the_address_that_was_bound(managers: tuple[WorldManager, WorldManager]) -> None:
    before = listening()
    await form(managers, "lines", "lines")
    assert len(listening() - before) == 1, "rank 0's port, and none of c10d's"
    hosts = {line.rsplit(":", 1)[0] for line in peers_of(managers[0])}
    assert hosts == {"127.0.0.2"}


def peers_of(host: WorldManager) -> list[str]:
    """Who is connected to the host's only open port, from the kernel's table."""
    (port,) = {port for _, port in host._doors._doors}
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    found = []
    for columns in map(str.split, lines):
        local_port, state = int(columns[1].rpartition(":")[2], 16), columns[3]
        if local_port == port and state == "01":
            address = columns[2].partition(":")[0]
            found.append(".".join(str(int(address[at : at + 2], 16)) for at in (6, 4, 2, 0)) + ":0")
    return found


async def test_address_that_is_not_ours_is_named_when_it_cannot_be_bound() -> None:
    async with WorldManager() as host, WorldManager(bind_host="192.0.2.7") as guest:
        with pytest.raises(JoinError, match="Cannot assign requested address"):
            await guest.initialize_world("w", 1, 2, "lines", port=host.listen(), timeout=0.5)
