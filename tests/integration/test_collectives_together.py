"""Concurrent operations in several worlds and in one world; ending one world does not affect the others."""

import asyncio
import gc
import weakref

import pytest
import torch

from multiworld import BrokenWorldException, Cause, World, WorldManager
from multiworld.collectives.reductions import all_reduce
from multiworld.ops.validation import WorldFacts
from tests.integration.crew import Crew
from tests.waiting import wait_until

BOTH = pytest.mark.parametrize("verified", [False, True])


@BOTH
def test_cancelled_collective_breaks_only_its_own_world(crew: Crew, verified: bool) -> None:
    async def part(manager: WorldManager, world: World) -> float:
        if world.rank == 0:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(manager.communicator.barrier(world.name), 0.05)
        elif world.rank == 1:
            with pytest.raises(BrokenWorldException) as caught:
                await manager.communicator.recv(torch.zeros(3), 0, world.name)
            assert (caught.value.cause, caught.value.rank) == (Cause.ABORTED, 0)
        else:
            with pytest.raises(BrokenWorldException) as caught:
                await manager.communicator.barrier(world.name)
            assert (caught.value.cause, caught.value.rank) == (Cause.ABORTED, 0)
        assert manager.communicator.is_broken(world.name)
        other = (await crew.worlds(3, not verified))[0].name
        tensor = torch.ones(5)
        await manager.communicator.all_reduce(tensor, world_name=other)
        return tensor.sum().item()

    crew.await_(crew.worlds(3, not verified))
    assert crew.run(3, part, verified=verified) == [15.0] * 3


@BOTH
def test_tensors_are_released_when_their_operations_complete(crew: Crew, verified: bool) -> None:
    async def part(manager: WorldManager, world: World) -> list[weakref.ref[torch.Tensor]]:
        tensor, message = torch.ones(2000), torch.ones(2000)
        await manager.communicator.all_reduce(tensor, world_name=world.name)
        if world.rank == 0:
            await manager.communicator.send(message, 1, world.name)
        else:
            await manager.communicator.recv(message, 0, world.name)
        return [weakref.ref(tensor), weakref.ref(message)]

    references = crew.run(2, part, verified=verified)
    tensors = [reference for each in references for reference in each]
    wait_until(lambda: gc.collect() >= 0 and all(tensor() is None for tensor in tensors))


@BOTH
def test_tensors_of_other_devices_are_staged_through_host_copies(
    crew: Crew, verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for GPU tensors on Gloo; here some CPU tensors are treated like this and others are not."""
    here_and_there = iter([True, False] * 1000)
    staged = WorldFacts.check_devices
    monkeypatch.setattr(
        WorldFacts,
        "check_devices",
        lambda *arguments: bool(not staged(*arguments) and next(here_and_there)) or verified,
    )

    async def part(manager: WorldManager, world: World) -> None:
        here, name, rank = manager.communicator, world.name, world.rank
        tensors = [torch.full((3, 2), float(rank + step)) for step in range(20)]
        reduced = [world.start(all_reduce(world.facts, each, torch.distributed.ReduceOp.SUM)) for each in tensors]
        got = [torch.zeros(2) for _ in range(20)]
        messages = [
            here.irecv(each, 0, name) if rank else here.isend(torch.full((2,), float(step)), 1, name)
            for step, each in enumerate(got)
        ]
        gathered = [torch.zeros(2), torch.zeros(2)]
        await here.all_to_all(gathered, [torch.full((2,), 10.0 * rank), torch.full((2,), 10.0 * rank + 1)], name)
        assert gathered[1].tolist() == [10.0 + rank] * 2
        output = torch.zeros(1)
        await here.reduce_scatter_tensor(output, torch.tensor([1.0, 2.0]), torch.distributed.ReduceOp.AVG, name)
        assert output.item() == rank + 1
        for operation in (*reduced, *messages):
            await operation
        for step, (tensor, message) in enumerate(zip(tensors, got, strict=True)):
            assert tensor.tolist() == [[2.0 * step + 1] * 2] * 3
            assert rank == 0 or message.tolist() == [step] * 2

    crew.run(2, part, verified=verified)


@BOTH
def test_conjugated_and_negated_views_are_sent_by_value(crew: Crew, verified: bool) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])

    async def part(manager: WorldManager, world: World) -> torch.Tensor:
        if world.rank == 0:
            await asyncio.gather(
                manager.communicator.send(value.conj(), 1, world.name),
                manager.communicator.send(value.conj().imag, 1, world.name, tag=1),
            )
            return torch.tensor(0)
        got, imaginary = torch.zeros(2, dtype=torch.complex64), torch.zeros(2)
        await asyncio.gather(
            manager.communicator.recv(got, 0, world.name), manager.communicator.recv(imaginary, 0, world.name, tag=1)
        )
        assert imaginary.tolist() == [-2.0, 4.0]
        return got

    assert crew.run(2, part, verified=verified)[1].tolist() == value.conj().resolve_conj().tolist()
