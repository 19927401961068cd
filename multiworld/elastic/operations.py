"""The all-reduces of an elastic world: one with a handle, and many that survive the loss of members.

The latter run, agree on the finished operations, and run the others again. The agreement, and why the results are bitwise equal on all
survivors, is in multiworld/elastic/protocol/rounds.py.

Small tensors share a bucket, and a large tensor has its own. No tensor is written before its bucket has finished on all members. So the
tensors keep their original values until then, and nothing has to be restored.
"""

import asyncio
from collections.abc import Coroutine, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.collectives import allreduce
from multiworld.collectives.reductions import AnyReduceOp
from multiworld.elastic.protocol.rounds import Round
from multiworld.errors import Cause, WorldError
from multiworld.ops.buffers import RecvBuffer, check_dense, check_distinct, contiguous, flat
from multiworld.ops.operation import Collective, Status, status_of
from multiworld.ops.validation import tensor_signature
from multiworld.world import World

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)
BUCKET_BYTES = 1 << 20
"""Maximum bytes of a bucket with several tensors: large enough to share one transfer, small enough to repeat little after a failure."""
TAG_LIMIT = 1 << 28
"""Tags of `all_reduce_async` are below this limit. The numbers of the buckets of a call follow."""
_OPS = {"SUM": ReduceOp.SUM, "AVG": ReduceOp.AVG, "MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX, "PRODUCT": ReduceOp.PRODUCT}


class AllReduceHandle:
    """An all-reduce started by `ElasticWorld.all_reduce_async`. Await it, or poll `done` and `status`.

    Awaiting it raises BrokenWorldException when a member is lost; the tensor then holds its original value.
    Cancelling the task that awaits it ends this view for all members.

    Attributes:
        view_number: number of the view in which it runs.
        world_size: number of members of that view.
    """

    def __init__(self, work: Coroutine[Any, Any, None], view_number: int, world_size: int) -> None:
        self.view_number = view_number
        self.world_size = world_size
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # no log if it is never awaited

    def done(self) -> bool:
        """Return whether it completed or failed."""
        return self._task.done()

    @property
    def status(self) -> Status:
        """ "pending", "done" or "failed"."""
        return status_of(self._task)

    def __await__(self) -> Generator[Any, None, None]:
        return self._task.__await__()


@dataclass(frozen=True, slots=True)
class AllReduceOutcome:
    """The outcome of a call.

    Attributes:
        success: all tensors hold their results. False when all other members left before that; then `world_size` is 1.
        bytes_sent, bytes_received: bytes of tensors that this member sent and received, failed attempts included.
        retries: how often unfinished operations were run again after a failure.
        world_size: number of members at the end of the call.
        contributors: for each tensor, the number of members that contributed to its result, which is the divisor of AVG; 0 if the tensor
            holds its original value.
    """

    success: bool
    bytes_sent: int
    bytes_received: int
    retries: int
    world_size: int
    contributors: tuple[int, ...]


def make_buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group the tensors, in the given order, into buckets of one dtype and device that are reduced together.

    Raises TypeError, ValueError.
    """
    writable = [_writable(tensor) for tensor in tensors]
    check_distinct("all_reduce", writable)
    buckets: list[list[Tensor]] = []
    size = 0
    for tensor in writable:
        first = buckets[-1][0] if buckets else None
        size += tensor.nbytes
        if first is None or size > BUCKET_BYTES or (first.dtype, first.device) != (tensor.dtype, tensor.device):
            buckets.append([])
            size = tensor.nbytes
        buckets[-1].append(tensor)
    return buckets


def _writable(tensor: Tensor) -> Tensor:
    """Return the tensor, without its gradient. Raises TypeError, ValueError if a result cannot be written into it."""
    check_dense("all_reduce", tensor)
    if tensor.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"all_reduce: cannot reduce {tensor.dtype}; expected one of {known}")
    return RecvBuffer("all_reduce", tensor, on_host=False).tensor


def flatten(bucket: list[Tensor]) -> Tensor:
    """Return the elements of the tensors as one flat, contiguous tensor on the host: a view of a single tensor if possible, else a copy."""
    parts = [flat(contiguous(tensor, on_host=True)) for tensor in bucket]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def write_back(bucket: list[Tensor], result: Tensor) -> None:
    """Copy the result into the tensors."""
    with torch.inference_mode():
        parts = result.to(bucket[0].device).split_with_sizes([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [part.view(each.shape) for part, each in zip(parts, bucket, strict=True)])


class AllReduceCall:
    """The all-reduces of one call on one member: one for each bucket of tensors. All members make a matching call.

    AVG is the sum divided by the number of members that contributed, for integers rounded towards zero.

    Args:
        memory: memory of results, by bucket, from earlier calls whose tensors are written. It is used again, because new memory costs more
            time than the transfer, and grows to the largest bucket.
    Attributes:
        contributors: for each bucket, the number of members of the view in which it finished here last; 0 before.
        bytes_moved: bytes of tensors that this member has sent, and received. Incomplete all-reduces do not count.
        runs: how often unfinished operations were run.

    Raises TypeError, ValueError for invalid arguments.
    """

    def __init__(self, tensors: Sequence[Tensor], op: AnyReduceOp, memory: dict[int, Tensor]) -> None:
        names = [name for name, known in _OPS.items() if op == known]
        if not names:
            raise ValueError(f"all_reduce: {op!s:.40} is not supported, only {', '.join(_OPS)}")
        self.buckets = make_buckets(tensors)
        self.bytes_moved = 0
        self.contributors = [0] * len(self.buckets)
        self.runs = 0
        self._op = names[0]
        self._memory = memory
        self._results: dict[int, Tensor] = {}

    @property
    def signature(self) -> str:
        """Describes the operations; equal on all members whose calls match."""
        sizes = [(str(bucket[0].dtype), [tensor.numel() for tensor in bucket]) for bucket in self.buckets]
        return f"{self._op} {sizes}"

    async def reduce(self, world: World, index: int, number: int) -> None:
        """Reduce one bucket of all members. `unpack` copies the result into its tensors.

        Args:
            number: identifies the operation among those of this view that are in flight.
        Raises BrokenWorldException when the view has ended. The operation may still write to its memory, which is not used again.
        """
        bucket = self.buckets[index]
        size = sum(tensor.nbytes for tensor in bucket)
        memory = self._memory.pop(index, None)
        if memory is None or memory.nbytes < size:
            memory = torch.empty(size, dtype=torch.uint8)
        result = self._results[index] = memory[:size].view(bucket[0].dtype)
        algorithm = partial(allreduce.all_reduce, data=flatten(bucket), result=result, op=self._op)
        signature = f"all_reduce({tensor_signature(result)}, {self._op})"
        await world.start(Collective(signature=signature, algorithm=lambda: algorithm, number=number)).finish()
        self._memory[index] = memory
        self.contributors[index] = world.size
        self.bytes_moved += allreduce.bytes_sent(result.nbytes, world.size)

    async def run(self, world: World, round_: Round, max_in_flight: int) -> None:
        """Run the unfinished operations and mark those that finish. Wait for all operations in flight, even if some of them fail.

        Raises WorldError when the view has ended. Any other error ends the view.
        """
        self.runs += 1
        window = asyncio.Semaphore(max_in_flight)

        async def reduce(index: int) -> None:
            async with window:
                try:
                    await self.reduce(world, index, TAG_LIMIT + index)
                except BaseException as error:
                    if not isinstance(error, WorldError):
                        world.fail(Cause.ABORTED, world.rank, "the call of this member ended")
                    raise
                round_.finished[index] = True

        for error in await asyncio.gather(*map(reduce, round_.unfinished), return_exceptions=True):
            if error is not None:
                raise error

    def unpack(self, index: int) -> None:
        """Copy a result into its tensors. The operation has finished on all members."""
        write_back(self.buckets[index], self._results.pop(index))
