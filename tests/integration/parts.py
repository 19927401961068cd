"""The part of each rank in each kind of operation, and the expected results."""

from collections.abc import Awaitable, Callable

import torch
from torch import Tensor

from multiworld import WorldManager


def _full(count: int, value: float) -> Tensor:
    return torch.full((count,), value)


class Part:
    """One rank's part. Rank r contributes the value r + 1, or 10 (r + 1) + index if it contributes one value per rank."""

    def __init__(self, manager: WorldManager, world: str, root: int, count: int) -> None:
        self._here = manager.communicator
        self._world = world
        self._rank, self._size = manager.world(world).rank, manager.world(world).size
        self._root, self._count = root, count
        self._mine = _full(count, self._rank + 1.0)
        self._blank = [_full(count, -1.0) for _ in range(self._size)]
        self._places = [_full(count, 10.0 * (self._rank + 1) + place) for place in range(self._size)]

    async def perform(self, operation: str) -> list[float]:
        """Run the operation and return the values of the result; all elements of a tensor are equal."""
        method: Callable[[], Awaitable[list[Tensor]]] = getattr(self, operation)
        results = await method()
        assert all(bool((each == each[0]).all()) for each in results if each.numel())
        return [each[0].item() for each in results if each.numel()]

    async def broadcast(self) -> list[Tensor]:
        await self._here.broadcast(self._mine, self._root, self._world)
        return [self._mine]

    async def all_reduce(self) -> list[Tensor]:
        await self._here.all_reduce(self._mine, world_name=self._world)
        return [self._mine]

    async def reduce(self) -> list[Tensor]:
        await self._here.reduce(self._mine, self._root, world_name=self._world)
        return [self._mine] if self._rank == self._root else []

    async def all_gather(self) -> list[Tensor]:
        await self._here.all_gather(self._blank, self._mine, self._world)
        return self._blank

    async def all_gather_into_tensor(self) -> list[Tensor]:
        output = _full(self._count * self._size, -1.0)
        await self._here.all_gather_into_tensor(output, self._mine, self._world)
        return list(output.reshape(self._size, self._count))

    async def gather(self) -> list[Tensor]:
        at_root = self._rank == self._root
        await self._here.gather(self._mine, self._blank if at_root else None, self._root, self._world)
        return self._blank if at_root else []

    async def scatter(self) -> list[Tensor]:
        places = self._places if self._rank == self._root else None
        await self._here.scatter(self._mine, places, self._root, self._world)
        return [self._mine]

    async def reduce_scatter(self) -> list[Tensor]:
        await self._here.reduce_scatter(self._mine, self._places, world_name=self._world)
        return [self._mine]

    async def reduce_scatter_tensor(self) -> list[Tensor]:
        await self._here.reduce_scatter_tensor(self._mine, torch.cat(self._places), world_name=self._world)
        return [self._mine]

    async def all_to_all(self) -> list[Tensor]:
        await self._here.all_to_all(self._blank, self._places, self._world)
        return self._blank

    async def barrier(self) -> list[Tensor]:
        await self._here.barrier(self._world)
        return []

    async def send_and_recv(self) -> list[Tensor]:
        """The root sends to every rank."""
        if self._rank == self._root:
            for peer in set(range(self._size)) - {self._root}:
                await self._here.send(self._mine, peer, self._world)
            return [self._mine]
        await self._here.recv(self._mine, self._root, self._world)
        return [self._mine]


OPERATIONS = [name for name in vars(Part) if not name.startswith("_") and name != "perform"]


def expected(operation: str, size: int, rank: int, root: int) -> list[float]:
    """The result of `perform` when nothing fails."""
    own = [each + 1.0 for each in range(size)]
    match operation:
        case "broadcast" | "send_and_recv":
            return [own[root]]
        case "all_reduce":
            return [sum(own)]
        case "reduce":
            return [sum(own)] if rank == root else []
        case "all_gather" | "all_gather_into_tensor":
            return own
        case "gather":
            return own if rank == root else []
        case "scatter":
            return [10 * own[root] + rank]
        case "reduce_scatter" | "reduce_scatter_tensor":
            return [sum(10 * each + rank for each in own)]
        case "all_to_all":
            return [10 * each + rank for each in own]
        case _:
            return []
