"""Worlds whose operations all go over the library's own connections: c10d builds nothing, and nobody listens but rank 0."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from multiworld import JoinError, WorldError, WorldManager


@pytest.fixture
async def managers() -> AsyncIterator[tuple[WorldManager, WorldManager]]:
    async with (
        WorldManager(verify_collectives=False) as host,
        WorldManager(verify_collectives=False, bind_host="127.0.0.2") as guest,
    ):
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
    await form(managers, "tcp", "tcp")
    sent, received = torch.arange(1000.0), torch.empty(1000)
    for source, target in (managers, managers[::-1]):
        rank = 0 if source is managers[0] else 1
        await asyncio.gather(
            source.world("w").send(sent * (rank + 1), 1 - rank), target.world("w").recv(received, rank)
        )
        assert torch.equal(received, sent * (rank + 1))


async def test_collectives_need_no_group_of_c10d(managers: tuple[WorldManager, WorldManager]) -> None:
    await form(managers, "tcp", "tcp")
    tensors = [torch.arange(200_000.0) * (rank + 1) for rank in range(2)]
    await asyncio.gather(
        *(
            manager.communicator.all_reduce(tensor, world_name="w")
            for manager, tensor in zip(managers, tensors, strict=True)
        )
    )
    assert all(torch.equal(tensor, torch.arange(200_000.0) * 3) for tensor in tensors)
    await asyncio.gather(*(manager.communicator.barrier("w") for manager in managers))


async def test_world_is_made_without_a_thread_or_connection_of_gloo_when_the_backend_is_gloo(
    managers: tuple[WorldManager, WorldManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a Gloo group was built")

    monkeypatch.setattr("multiworld.execution.process_group._make_gloo", refuse)
    await form(managers, "gloo", "tcp")
    results = [[torch.zeros(3), torch.zeros(3)] for _ in managers]
    await asyncio.gather(
        *(
            manager.communicator.all_gather(result, torch.full((3,), float(rank)), "w")
            for rank, (manager, result) in enumerate(zip(managers, results, strict=True))
        )
    )
    assert [[each.tolist() for each in result] for result in results] == [[[0.0] * 3, [1.0] * 3]] * 2


async def test_members_say_so_when_they_were_given_different_backends(
    managers: tuple[WorldManager, WorldManager],
) -> None:
    host, guest = managers
    port = host.listen()
    hosting = asyncio.create_task(host.initialize_world("w", 0, 2, "tcp", port=port))
    told = "rank 0 has backend=cpu:tcp, verify_collectives=False, store=False; we have backend=cpu:c10d-gloo,"
    with pytest.raises(JoinError, match=told):
        await guest.initialize_world("w", 1, 2, "c10d-gloo", port=port)
    (ending,) = await asyncio.gather(hosting, return_exceptions=True)
    assert isinstance(ending, WorldError), "rank 0 is notified at once"


async def test_connections_leave_from_the_address_that_was_bound(managers: tuple[WorldManager, WorldManager]) -> None:
    before = listening()
    await form(managers, "tcp", "tcp")
    assert len(listening() - before) == 1, "only rank 0's port, none of c10d's"
    hosts = {line.rsplit(":", 1)[0] for line in peers_of(managers[0])}
    assert hosts == {"127.0.0.2"}


def peers_of(host: WorldManager) -> list[str]:
    """Who is connected to the host's only open port, from the kernel's table."""
    (port,) = {port for _, port in host._listeners._listeners}
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
            await guest.initialize_world("w", 1, 2, "tcp", port=host.listen(), timeout=0.5)
