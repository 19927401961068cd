"""The operations of all worlds of a process. Each takes the name of its world."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.collectives import movement, reductions
from multiworld.collectives.reductions import AnyReduceOp
from multiworld.errors import BrokenWorldException, WorldError
from multiworld.ops import p2p
from multiworld.ops.operation import Operation
from multiworld.ops.validation import WorldFacts
from multiworld.world import World

__all__ = ["BrokenWorldException", "WorldCommunicator"]


class Worlds(Protocol):
    """Finds worlds by name. Implemented by `WorldManager`."""

    def world(self, world_name: str) -> World: ...

    def is_broken(self, world_name: str) -> bool: ...


class WorldCommunicator:
    """Point-to-point and collective operations, in place, by world name. All of them raise the same errors:

    Raises:
        BrokenWorldException: a member of the world failed or left. Join again. The contents of output tensors are undefined.
        WorldClosedError: this process closed the world.
        WorldNotFoundError: this process has no world of that name.
        ValueError, TypeError: invalid arguments. Nothing was sent and the world can still be used.

    Tensors have any shape, including empty and 0-dimensional. Non-contiguous tensors are copied. All dtypes can be sent. The CPU reduces
    float16, bfloat16, float32, float64, int8, uint8, int32, int64, bool (MIN, MAX, BAND, BOR, BXOR) and complex (SUM, AVG). CUDA
    tensors are copied through host memory, except for collectives with NCCL. Do not use a tensor until its operation is done. All members
    must call the collectives of a world in the same order. Operations of different worlds run concurrently.

    `timeout_s` is the time in seconds after which the world breaks with cause `timeout`. With None only the failure of a member ends the
    wait. Cancelling an operation breaks its world and no other.
    """

    def __init__(self, manager: Worlds) -> None:
        self._manager = manager

    def is_broken(self, world_name: str) -> bool:
        """Return whether the world cannot be used: it broke, was closed or removed, or was never opened here."""
        return self._manager.is_broken(world_name)

    # -- point to point --------------------------------------------------------------------------------------------------------

    async def send(
        self, tensor: Tensor, dst: int, world_name: str = "", *, tag: int = 0, timeout_s: float | None = None
    ) -> None:
        """Send `tensor` to rank `dst`. Returns after the receiver has started its receive; the tensor may be changed then.

        Args:
            tag: must equal the tag of the receive; from 0 to 2**29 - 1. Messages with the same tag arrive in order.
        """
        await self._run(world_name, lambda facts: p2p.send(facts, tensor, dst, tag), timeout_s)

    async def recv(
        self, tensor: Tensor, src: int, world_name: str = "", *, tag: int = 0, timeout_s: float | None = None
    ) -> None:
        """Receive from rank `src` into `tensor`. If element count or dtype differ from the sender's, the world breaks, cause `error`."""
        await self._run(world_name, lambda facts: p2p.recv(facts, tensor, src, tag), timeout_s)

    def isend(
        self, tensor: Tensor, dst: int, world_name: str = "", *, tag: int = 0, timeout_s: float | None = None
    ) -> Operation:
        """Start a send and return at once. Await the returned operation, or poll its `done()` and `status`."""
        return self._start(world_name, lambda facts: p2p.send(facts, tensor, dst, tag), timeout_s)

    def irecv(
        self, tensor: Tensor, src: int, world_name: str = "", *, tag: int = 0, timeout_s: float | None = None
    ) -> Operation:
        """Start a receive and return at once. Await the returned operation, or poll its `done()` and `status`."""
        return self._start(world_name, lambda facts: p2p.recv(facts, tensor, src, tag), timeout_s)

    # -- collectives with a root -----------------------------------------------------------------------------------------------

    async def broadcast(
        self, tensor: Tensor, src: int, world_name: str = "", *, timeout_s: float | None = None
    ) -> None:
        """Copy `tensor` of rank `src` into `tensor` of all other ranks."""
        await self._run(world_name, lambda facts: movement.broadcast(facts, tensor, src), timeout_s)

    async def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: AnyReduceOp = ReduceOp.SUM,
        world_name: str = "",
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Reduce `tensor` of all ranks into `tensor` of rank `dst`. At the other ranks its contents are undefined afterwards."""
        await self._run(world_name, lambda facts: reductions.reduce(facts, tensor, dst, op), timeout_s)

    async def gather(
        self,
        tensor: Tensor,
        gather_list: Sequence[Tensor] | None = None,
        dst: int = 0,
        world_name: str = "",
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Copy `tensor` of rank r into `gather_list[r]` of rank `dst`. Tensors have the same size; `gather_list` is None elsewhere."""
        await self._run(world_name, lambda facts: movement.gather(facts, tensor, gather_list, dst), timeout_s)

    async def scatter(
        self,
        tensor: Tensor,
        scatter_list: Sequence[Tensor] | None = None,
        src: int = 0,
        world_name: str = "",
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Copy `scatter_list[r]` of rank `src` into `tensor` of rank r. Tensors have the same size; `scatter_list` is None elsewhere."""
        await self._run(world_name, lambda facts: movement.scatter(facts, tensor, scatter_list, src), timeout_s)

    # -- collectives without a root --------------------------------------------------------------------------------------------

    async def all_reduce(
        self, tensor: Tensor, op: AnyReduceOp = ReduceOp.SUM, world_name: str = "", *, timeout_s: float | None = None
    ) -> None:
        """Reduce `tensor` of all ranks; every rank gets the result in its `tensor`."""
        await self._run(world_name, lambda facts: reductions.all_reduce(facts, tensor, op), timeout_s)

    async def all_gather(
        self, tensors: Sequence[Tensor], tensor: Tensor, world_name: str = "", *, timeout_s: float | None = None
    ) -> None:
        """Copy `tensor` of rank r into `tensors[r]` of every rank. All tensors have the same size."""
        await self._run(world_name, lambda facts: movement.all_gather(facts, tensors, tensor), timeout_s)

    async def all_gather_into_tensor(
        self, output: Tensor, tensor: Tensor, world_name: str = "", *, timeout_s: float | None = None
    ) -> None:
        """Concatenate `tensor` of all ranks in `output`, in rank order. `output` has world size times as many elements as `tensor`."""
        await self._run(world_name, lambda facts: movement.all_gather_into_tensor(facts, output, tensor), timeout_s)

    async def reduce_scatter(
        self,
        output: Tensor,
        input_list: Sequence[Tensor],
        op: AnyReduceOp = ReduceOp.SUM,
        world_name: str = "",
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Reduce `input_list[r]` of all ranks into `output` of rank r. All tensors have the size of `output`."""
        await self._run(world_name, lambda facts: reductions.reduce_scatter(facts, output, input_list, op), timeout_s)

    async def reduce_scatter_tensor(
        self,
        output: Tensor,
        tensor: Tensor,
        op: AnyReduceOp = ReduceOp.SUM,
        world_name: str = "",
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Like `reduce_scatter`, with the inputs concatenated in `tensor`."""
        await self._run(
            world_name, lambda facts: reductions.reduce_scatter_tensor(facts, output, tensor, op), timeout_s
        )

    async def all_to_all(
        self,
        output_list: Sequence[Tensor],
        input_list: Sequence[Tensor],
        world_name: str = "",
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Send `input_list[r]` to rank r and receive from rank r into `output_list[r]`. Each pair of ranks may use another size."""
        await self._run(world_name, lambda facts: movement.all_to_all(facts, output_list, input_list), timeout_s)

    async def barrier(self, world_name: str = "", *, timeout_s: float | None = None) -> None:
        """Wait until every member has called `barrier`."""
        await self._run(world_name, reductions.barrier, timeout_s)

    # -- inside ----------------------------------------------------------------------------------------------------------------

    def _start(self, world_name: str, make: Callable[[WorldFacts], Operation], timeout_s: float | None) -> Operation:
        world = self._manager.world(world_name)
        return world.start(make(world.facts), timeout_s=timeout_s)

    async def _run(self, world_name: str, make: Callable[[WorldFacts], Operation], timeout_s: float | None) -> None:
        try:
            operation = self._start(world_name, make, timeout_s)
        except WorldError:
            # A caller that retries in a loop, as programs for pymultiworld do, must not block the event loop.
            await asyncio.sleep(0)
            raise
        await operation.finish()
