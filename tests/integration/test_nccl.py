"""Tests of NCCL worlds, and of Gloo worlds with GPU tensors, on one GPU; docs/gpu.md lists what is not tested."""

import asyncio
import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ReduceOp

from multiworld import BrokenWorldException, Cause, WorldManager, WorldState
from multiworld.collectives import reductions
from multiworld.collectives.nccl import check_nccl_device, uses_nccl
from multiworld.ops import p2p as messages
from multiworld.ops.validation import WorldFacts

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_nccl_is_refused_with_a_clear_error_without_a_gpu() -> None:
    with pytest.raises(ValueError, match="needs a CUDA device"):
        uses_nccl("nccl")


ON_SECOND = WorldFacts("w", 0, 2, torch.device("cuda", 1))
"""Of a world on the second device; meta tensors suffice to test which tensors are created and checked."""


def test_tensor_on_another_device_than_the_worlds_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiworld.ops.validation.check_dense", lambda *_: None)  # it refuses tensors without memory
    with FakeTensorMode():
        ours, other = torch.zeros(4, device="cuda:1"), torch.zeros(4, device="cuda:0")
        assert not reductions.all_reduce(ON_SECOND, ours, ReduceOp.SUM).staged
        with pytest.raises(
            ValueError, match="all_reduce: the tensors are on cuda:0, but world 'w' of size 2 uses cuda:1"
        ):
            reductions.all_reduce(ON_SECOND, other, ReduceOp.SUM)
        with pytest.raises(ValueError, match="send: the tensors are on cuda:0"):
            messages.send(ON_SECOND, other, 1, 0)
        assert messages.send(ON_SECOND, ours, 1, 0).staged, "NCCL carries no messages"


def test_nccl_uses_the_current_device_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for device in ("cpu", "cuda", "cuda:1"):
        assert check_nccl_device(torch.device(device)) == torch.device("cuda", 1)
    assert check_nccl_device(torch.device("cuda", 0)) == torch.device("cuda", 0)
    with pytest.raises(ValueError, match="device cuda:2 does not exist: expected an index below 2"):
        check_nccl_device(torch.device("cuda", 2))


@needs_gpu
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
async def test_every_collective_gives_its_result_in_a_world_of_one(manager: WorldManager, backend: str) -> None:
    await manager.initialize_world("w", 0, 1, backend=backend, port=0, device=_device())
    here, value = manager.communicator, torch.arange(5.0, device=_device())
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
        tensor = value.clone()
        await here.all_reduce(tensor, op, "w")
        assert torch.equal(tensor, value)
    tensor = value.clone()
    await here.broadcast(tensor, 0, "w")
    await here.reduce(tensor, 0, world_name="w")
    assert torch.equal(tensor, value)
    for call in (here.all_gather, here.all_to_all):
        outputs = [torch.zeros_like(value)]
        await call(outputs, value if call == here.all_gather else [value], "w")  # type: ignore[arg-type]
        assert torch.equal(outputs[0], value)
    outputs = [torch.zeros_like(value) for _ in range(4)]
    await here.all_gather_into_tensor(outputs[0], value, "w")
    await here.reduce_scatter(outputs[1], [value], world_name="w")
    await here.reduce_scatter_tensor(outputs[2], value, world_name="w")
    await here.scatter(outputs[3], [value], 0, "w")
    assert all(torch.equal(output, value) for output in outputs)
    await here.barrier("w")


@needs_gpu
async def test_operation_waits_for_earlier_work_on_the_stream(manager: WorldManager) -> None:
    await manager.initialize_world("w", 0, 1, backend="nccl", port=0, device=_device())
    tensor = torch.zeros(1 << 20, device=_device())
    stream = torch.cuda.Stream(_device())  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
        tensor += 1
        await manager.communicator.all_reduce(tensor, world_name="w")
    assert tensor.sum().item() == tensor.numel()


@needs_gpu
async def test_operation_may_be_pending_for_longer_than_forming_may_take(manager: WorldManager) -> None:
    await manager.initialize_world("w", 0, 1, backend="nccl", port=0, timeout=2, device=_device())
    tensor = torch.ones(4, device=_device())
    torch.cuda._sleep(8_000_000_000)  # type: ignore[no-untyped-call] # about 4 s
    await manager.communicator.all_reduce(tensor, world_name="w")
    assert tensor.tolist() == [1.0] * 4


@needs_gpu
async def test_error_of_one_world_does_not_end_a_process_of_torchrun(
    manager: WorldManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    await manager.initialize_world("w", 0, 1, backend="nccl", port=0, device=_device())
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
async def test_messages_do_not_block_each_other_or_collectives() -> None:
    """Both members send first, and one receive is pending while a collective runs."""
    async with WorldManager() as first, WorldManager() as second:
        port = first.listen()

        async def part(manager: WorldManager, rank: int) -> None:
            device = torch.device("cuda", rank)
            await manager.initialize_world("w", rank, 2, backend="nccl", port=port, device=device)
            here = manager.communicator
            late = here.irecv(torch.zeros(4, device=device), 1 - rank, "w", tag=1)
            got = torch.zeros(1 << 20, device=device)
            sending = here.isend(torch.full((1 << 20,), float(rank), device=device), 1 - rank, "w")
            await here.recv(got, 1 - rank, "w")
            await sending
            assert bool((got == 1 - rank).all())
            await here.all_reduce(got, world_name="w")
            assert bool((got == 1).all())
            await here.send(torch.ones(4, device=device), 1 - rank, "w", tag=1)
            await late

        await asyncio.gather(part(first, 0), part(second, 1))


@needs_gpu
async def test_broken_world_can_be_formed_again(manager: WorldManager) -> None:
    for generation in range(1, 6):
        world = await manager.initialize_world("w", 0, 1, backend="nccl", port=0, device=_device())
        assert world.generation == generation
        tensor = torch.ones(1024, device=_device())
        await manager.communicator.all_reduce(tensor, world_name="w")
        world.fail(Cause.ABORTED, 0, "test")
        assert await asyncio.to_thread(world.reclaimed.wait, 60)
        assert world.state is WorldState.BROKEN
        with pytest.raises(BrokenWorldException):
            await manager.communicator.all_reduce(tensor, world_name="w")


@needs_gpu
@pytest.mark.parametrize("backend", ["multiworld", "cpu:gloo,cuda:gloo"])
@pytest.mark.parametrize("verified", [False, True])
async def test_gloo_carries_gpu_tensors(backend: str, verified: bool) -> None:
    async with WorldManager(verify_collectives=verified) as first, WorldManager(verify_collectives=verified) as second:
        port = first.listen()

        async def part(manager: WorldManager, rank: int) -> torch.Tensor:
            await manager.initialize_world("w", rank, 2, backend=backend, port=port)
            tensor = torch.full((3, 1000), float(rank + 1), device=_device())
            await manager.communicator.all_reduce(tensor.t(), world_name="w")
            got = torch.zeros(4, device=_device())
            if rank == 0:
                await manager.communicator.send(tensor[0, :4], 1, "w")
            else:
                await manager.communicator.recv(got, 0, "w")
                assert got.tolist() == [3.0] * 4
            on_host = torch.ones(2)
            await manager.communicator.broadcast(on_host, 1, "w")
            return tensor

        for tensor in await asyncio.gather(part(first, 0), part(second, 1)):
            assert bool((tensor == 3.0).all())
