"""The operations of all worlds of a process, by world name."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed import ReduceOp

from multiworld import collectives, messages, reductions
from multiworld.arguments import Ranks
from multiworld.errors import WorldError
from multiworld.operation import Operation, Plan
from multiworld.reductions import AnyReduceOp

if TYPE_CHECKING:
    from multiworld.world_manager import WorldManager


class WorldCommunicator:
    """Every operation is async, takes the world's name last, works in place, and raises the same errors.

    Raises:
        BrokenWorldException: a member of that world failed. The world is gone; join again. What a tensor holds is undefined.
        WorldClosedError: we closed it.
        WorldNotFoundError: no such world here.
        ValueError, TypeError: arguments that cannot be right, before anything was sent. The world is unharmed.

    Tensors may be of any shape, empty and 0-dimensional ones included, and need not be contiguous: then they are copied. All dtypes
    travel; Gloo reduces float16, bfloat16, float32, float64, int8, uint8, int32, int64, bool (MIN, MAX, BAND, BOR, BXOR) and complex
    (SUM, AVG). On a Gloo world, tensors of a CUDA device cross through host memory. Leave a tensor alone until its operation is done.
    All members must call the collectives of a world in the same order; different worlds run side by side.

    Every operation takes `timeout_s`: seconds after which the world counts as broken (cause `timeout`). None leaves it to the
    watchdog: a member that is alive may take as long as it likes. Cancelling an operation breaks its own world, and no other.
    """

    def __init__(self, manager: "WorldManager") -> None:
        self._manager = manager

    def is_broken(self, world_name: str) -> bool:
        """Whether that world cannot be used any more: it broke, was removed, or never was."""
        return self._manager.is_broken(world_name)

    # -- from one member to another --------------------------------------------------------------------------------------------

    async def send(
        self, tensor: Tensor, dst: int, world_name: str = "", *, tag: int = 0, timeout_s: float | None = None
    ) -> None:
        """Send `tensor` to rank `dst`. Returns when the receiver has posted its receive; the tensor may be changed then.

        Args:
            tag: matched by the receiver's, below 2**29; messages of one tag arrive in order.
        """
        await self._run(world_name, lambda ranks: messages.send(ranks, tensor, dst, tag), timeout_s)

    async def recv(
        self, tensor: Tensor, src: int, world_name: str = "", *, tag: int = 0, timeout_s: float | None = None
    ) -> None:
        """Receive into `tensor`: as many elements as rank `src` sends, of the same dtype; else the world breaks, cause `error`."""
        await self._run(world_name, lambda ranks: messages.recv(ranks, tensor, src, tag), timeout_s)

    def isend(
        self, tensor: Tensor, dst: int, world_name: str = "", *, tag: int = 0, timeout_s: float | None = None
    ) -> Operation:
        """Start to send, and return at once; await what it returns, or ask its `done()` and `status`."""
        return self._start(world_name, lambda ranks: messages.send(ranks, tensor, dst, tag), timeout_s)

    def irecv(
        self, tensor: Tensor, src: int, world_name: str = "", *, tag: int = 0, timeout_s: float | None = None
    ) -> Operation:
        """Start to receive, and return at once; await what it returns, or ask its `done()` and `status`."""
        return self._start(world_name, lambda ranks: messages.recv(ranks, tensor, src, tag), timeout_s)

    # -- from one to all, and back ---------------------------------------------------------------------------------------------

    async def broadcast(
        self, tensor: Tensor, src: int, world_name: str = "", *, timeout_s: float | None = None
    ) -> None:
        """Give everybody what rank `src` has in `tensor`."""
        await self._run(world_name, lambda ranks: collectives.broadcast(ranks, tensor, src), timeout_s)

    async def reduce(
        self,
        tensor: Tensor,
        dst: int,
        op: AnyReduceOp = ReduceOp.SUM,
        world_name: str = "",
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Reduce everybody's `tensor` into that of rank `dst`. What it holds at the other ranks afterwards is undefined."""
        await self._run(world_name, lambda ranks: reductions.reduce(ranks, tensor, dst, op), timeout_s)

    async def gather(
        self,
        tensor: Tensor,
        gather_list: Sequence[Tensor] | None = None,
        dst: int = 0,
        world_name: str = "",
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Collect everybody's `tensor` in rank `dst`'s `gather_list`, one tensor of the same size a rank; None at the others."""
        await self._run(world_name, lambda ranks: collectives.gather(ranks, tensor, gather_list, dst), timeout_s)

    async def scatter(
        self,
        tensor: Tensor,
        scatter_list: Sequence[Tensor] | None = None,
        src: int = 0,
        world_name: str = "",
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Give each rank its tensor of rank `src`'s `scatter_list`, in `tensor`; the list is None at the others."""
        await self._run(world_name, lambda ranks: collectives.scatter(ranks, tensor, scatter_list, src), timeout_s)

    # -- from all to all -------------------------------------------------------------------------------------------------------

    async def all_reduce(
        self, tensor: Tensor, op: AnyReduceOp = ReduceOp.SUM, world_name: str = "", *, timeout_s: float | None = None
    ) -> None:
        """Reduce everybody's `tensor`; all get the result, in it."""
        await self._run(world_name, lambda ranks: reductions.all_reduce(ranks, tensor, op), timeout_s)

    async def all_gather(
        self, tensors: Sequence[Tensor], tensor: Tensor, world_name: str = "", *, timeout_s: float | None = None
    ) -> None:
        """Collect everybody's `tensor` in everybody's `tensors`, one tensor of the same size a rank."""
        await self._run(world_name, lambda ranks: collectives.all_gather(ranks, tensors, tensor), timeout_s)

    async def all_gather_into_tensor(
        self, output: Tensor, tensor: Tensor, world_name: str = "", *, timeout_s: float | None = None
    ) -> None:
        """Collect everybody's `tensor` in `output`, one after the other: size of the world times as many elements."""
        await self._run(world_name, lambda ranks: collectives.all_gather_into_tensor(ranks, output, tensor), timeout_s)

    async def reduce_scatter(
        self,
        output: Tensor,
        input_list: Sequence[Tensor],
        op: AnyReduceOp = ReduceOp.SUM,
        world_name: str = "",
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Reduce everybody's `input_list`, one tensor of the size of `output` a rank; each rank gets the result of its place."""
        await self._run(world_name, lambda ranks: reductions.reduce_scatter(ranks, output, input_list, op), timeout_s)

    async def reduce_scatter_tensor(
        self,
        output: Tensor,
        tensor: Tensor,
        op: AnyReduceOp = ReduceOp.SUM,
        world_name: str = "",
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Like `reduce_scatter`, the inputs one after the other in `tensor`."""
        await self._run(
            world_name, lambda ranks: reductions.reduce_scatter_tensor(ranks, output, tensor, op), timeout_s
        )

    async def all_to_all(
        self,
        output_list: Sequence[Tensor],
        input_list: Sequence[Tensor],
        world_name: str = "",
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Send `input_list[r]` to rank r and receive from it into `output_list[r]`. Sizes may differ from pair to pair."""
        await self._run(world_name, lambda ranks: collectives.all_to_all(ranks, output_list, input_list), timeout_s)

    async def barrier(self, world_name: str = "", *, timeout_s: float | None = None) -> None:
        """Wait until every member has come here."""
        await self._run(world_name, reductions.barrier, timeout_s)

    # -- inside ----------------------------------------------------------------------------------------------------------------

    def _start(self, world_name: str, plan: Callable[[Ranks], Plan], timeout_s: float | None) -> Operation:
        world = self._manager.world(world_name)
        return world.start(plan(world.ranks), timeout_s=timeout_s)

    async def _run(self, world_name: str, plan: Callable[[Ranks], Plan], timeout_s: float | None) -> None:
        try:
            operation = self._start(world_name, plan, timeout_s)
        except WorldError:
            await asyncio.sleep(0)  # who tries in a loop, as pymultiworld's users do, must not starve the others
            raise
        await operation.finish()
