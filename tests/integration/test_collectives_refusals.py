"""Invalid arguments are rejected before anything is sent, and the world stays usable."""

import asyncio
import re
from collections.abc import Awaitable, Callable

import pytest
import torch
from torch.distributed import ReduceOp

from multiworld import World, WorldCommunicator, WorldManager
from tests.integration.crew import Crew

SIZE = 3

t = torch.zeros
Call = Callable[[WorldCommunicator, str], Awaitable[None]]

WRONG: dict[str, tuple[type[Exception], str, Call]] = {
    "send to oneself": (ValueError, "rank 0 is not a peer", lambda c, w: c.send(t(1), 0, w)),
    "send to nobody": (ValueError, "rank 3 is not a peer", lambda c, w: c.send(t(1), 3, w)),
    "recv from nobody": (ValueError, "rank -1 is not a peer", lambda c, w: c.recv(t(1), -1, w)),
    "recv into expanded": (ValueError, "expanded tensor", lambda c, w: c.recv(t(1).expand(4), 1, w)),
    "tag too high": (ValueError, "tag must be", lambda c, w: c.send(t(1), 1, w, tag=1 << 29)),
    "tag below zero": (ValueError, "tag must be", lambda c, w: c.recv(t(1), 1, w, tag=-1)),
    "no tensor": (TypeError, "expected a tensor, got list", lambda c, w: c.send([1.0], 1, w)),  # type: ignore[arg-type]
    "sparse": (TypeError, "dense", lambda c, w: c.broadcast(t(3, 3).to_sparse(), 0, w)),
    "meta": (TypeError, "dense", lambda c, w: c.all_reduce(torch.zeros(3, device="meta"), world_name=w)),
    "broadcast root": (ValueError, "rank 3 does not exist", lambda c, w: c.broadcast(t(1), 3, w)),
    "reduce root": (ValueError, "rank -1 does not exist", lambda c, w: c.reduce(t(1), -1, world_name=w)),
    "gather without list": (ValueError, "must pass gather_list", lambda c, w: c.gather(t(1), None, 0, w)),
    "gather list elsewhere": (ValueError, "for rank 1 only", lambda c, w: c.gather(t(1), [t(1)] * 3, 1, w)),
    "gather list short": (ValueError, "list of 3 tensors", lambda c, w: c.gather(t(1), [t(1)] * 2, 0, w)),
    "gather sizes": (ValueError, "tensor 1 of the list", lambda c, w: c.gather(t(1), [t(1), t(2), t(1)], 0, w)),
    "gather dtypes": (TypeError, "int64", lambda c, w: c.gather(t(1), [t(1), t(1), t(1).long()], 0, w)),
    "gather aliases": (ValueError, "same memory", lambda c, w: c.gather(t(1), [t(1)] * 3, 0, w)),
    "scatter without list": (ValueError, "must pass scatter_list", lambda c, w: c.scatter(t(1), [], 0, w)),
    "scatter list elsewhere": (ValueError, "for rank 2 only", lambda c, w: c.scatter(t(1), [t(1)] * 3, 2, w)),
    "scatter list long": (ValueError, "list of 3 tensors", lambda c, w: c.scatter(t(1), [t(1)] * 4, 0, w)),
    "all_gather list": (ValueError, "list of 3 tensors", lambda c, w: c.all_gather([t(1)], t(1), w)),
    "all_gather_into_tensor": (ValueError, "3 times", lambda c, w: c.all_gather_into_tensor(t(4), t(1), w)),
    "all_gather_into_tensor dtypes": (TypeError, "int64", lambda c, w: c.all_gather_into_tensor(t(3).long(), t(1), w)),
    "reduce_scatter list": (ValueError, "list of 3", lambda c, w: c.reduce_scatter(t(1), [t(1)], world_name=w)),
    "reduce_scatter sizes": (
        ValueError,
        "tensor 0 of the list",
        lambda c, w: c.reduce_scatter(t(1), [t(2)] * 3, world_name=w),
    ),
    "reduce_scatter_tensor": (
        ValueError,
        "3 times",
        lambda c, w: c.reduce_scatter_tensor(t(1), t(2), world_name=w),
    ),
    "all_to_all lists": (ValueError, "one input", lambda c, w: c.all_to_all([t(1)] * 3, [t(1)], w)),
    "all_to_all dtypes": (TypeError, "one dtype", lambda c, w: c.all_to_all([t(1), t(1), t(1)], [t(1).int()] * 3, w)),
    "all_to_all aliases": (ValueError, "same memory", lambda c, w: c.all_to_all([t(1)] * 3, [t(1)] * 3, w)),
    "all_to_all own part": (ValueError, "the own rank", lambda c, w: c.all_to_all([t(2), t(1), t(1)], [t(1)] * 3, w)),
    "average of integers": (TypeError, "AVG", lambda c, w: c.all_reduce(t(1).int(), ReduceOp.AVG, w)),
    "bits of floats": (TypeError, "BAND", lambda c, w: c.all_reduce(t(1), ReduceOp.BAND, w)),
    "sum of bools": (TypeError, "SUM", lambda c, w: c.reduce(t(1).bool(), 0, ReduceOp.SUM, w)),
    "int16": (TypeError, "int16", lambda c, w: c.all_reduce(t(1).short(), ReduceOp.SUM, w)),
    "float8": (TypeError, "float8", lambda c, w: c.all_reduce(t(1).to(torch.float8_e5m2), ReduceOp.MAX, w)),
    "order of complex": (TypeError, "complex", lambda c, w: c.all_reduce(t(1).to(torch.complex64), ReduceOp.MAX, w)),
    "unknown reduction": (
        ValueError,
        "not supported",
        lambda c, w: c.all_reduce(t(1), ReduceOp.PREMUL_SUM, w),
    ),
    "conjugated output": (ValueError, "conjugated", lambda c, w: c.recv(t(1).to(torch.complex64).conj(), 1, w)),
}


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("what", WRONG)
def test_invalid_arguments_are_rejected_and_the_world_stays_usable(crew: Crew, what: str, checked: bool) -> None:
    expected, words, call = WRONG[what]

    async def part(manager: WorldManager, world: World) -> float:
        if world.rank == 0:
            with pytest.raises(expected, match=re.escape(words)):
                await call(manager.communicator, world.name)
        tensor = torch.tensor(float(world.rank))
        await manager.communicator.all_reduce(tensor, world_name=world.name)
        return tensor.item()

    assert crew.run(SIZE, part, checked=checked) == [3.0] * SIZE


def test_tensor_is_rejected_when_no_backend_supports_its_device(crew: Crew) -> None:
    """Gloo carries tensors of any device through host memory; other tensors are rejected."""

    async def part(manager: WorldManager, world: World) -> None:
        mixed = [torch.zeros(1), torch.zeros(1, device="meta")]
        with pytest.raises(TypeError, match="dense"):
            await manager.communicator.all_to_all(mixed, mixed, world.name)

    crew.run(2, part)


@pytest.mark.parametrize("checked", [False, True])
def test_conjugated_and_negated_views_are_sent_by_value(crew: Crew, checked: bool) -> None:
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
            manager.communicator.recv(got, 0, world.name),
            manager.communicator.recv(imaginary, 0, world.name, tag=1),
        )
        assert imaginary.tolist() == [-2.0, 4.0]
        return got

    assert crew.run(2, part, checked=checked)[1].tolist() == value.conj().resolve_conj().tolist()


def test_outputs_that_require_gradients_are_filled(crew: Crew) -> None:
    async def part(manager: WorldManager, world: World) -> list[float]:
        tensor = torch.full((4,), float(world.rank), requires_grad=True)
        strided = torch.full((4, 2), float(world.rank)).requires_grad_()[:, 0]
        await manager.communicator.broadcast(tensor, 1, world.name)
        await manager.communicator.all_reduce(strided, world_name=world.name)
        return [*tensor.tolist(), *strided.tolist()]

    assert crew.run(2, part) == [[1.0] * 8] * 2
