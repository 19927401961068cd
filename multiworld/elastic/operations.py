"""The all-reduces of an elastic world: one with a handle, and many that survive the loss of members.

The latter run, agree on the finished operations, and run the others again. The agreement, and why the results are bitwise equal on all
survivors, is in multiworld/elastic/protocol/rounds.py.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from multiworld.collectives.reductions import AnyReduceOp
from multiworld.elastic.allreduce.bucket import Bucket, Workspace, make_buckets
from multiworld.elastic.allreduce.channel import ByteCounters, TaggedChannel, ViewWorld
from multiworld.elastic.allreduce.quantization import Quantization, check_quantizable
from multiworld.elastic.allreduce.quantized import quantized_all_reduce
from multiworld.elastic.allreduce.reduction import Reduction
from multiworld.elastic.allreduce.ring import direct_all_reduce, prefers_ring, ring_all_reduce
from multiworld.elastic.protocol.rounds import Round
from multiworld.errors import WorldError

Status = Literal["pending", "done", "failed"]


class AllReduceHandle:
    """An all-reduce started by `ElasticWorld.all_reduce_async`. Await it, or poll `done` and `status`.

    Awaiting it raises BrokenWorldException when a member is lost; the tensor then holds its original value.
    Cancelling the task that awaits it ends this view for all members.

    Attributes:
        view_number: number of the view in which it runs.
        world_size: number of members of that view.
        counters: bytes of tensors sent and received so far.
    """

    def __init__(
        self, work: Coroutine[Any, Any, None], view_number: int, world_size: int, counters: ByteCounters
    ) -> None:
        self.view_number = view_number
        self.world_size = world_size
        self.counters = counters
        self._task = asyncio.get_running_loop().create_task(work)
        self._task.add_done_callback(_retrieve_exception)

    def done(self) -> bool:
        """Return whether it completed or failed."""
        return self._task.done()

    @property
    def status(self) -> Status:
        """ "pending", "done" or "failed"."""
        if not self._task.done():
            return "pending"
        return "failed" if self._task.cancelled() or self._task.exception() is not None else "done"

    def __await__(self) -> Generator[Any, None, None]:
        return self._task.__await__()


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    """Retrieve the exception, so that asyncio does not log it if the handle is never awaited."""
    if not task.cancelled():
        task.exception()


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


@dataclass(frozen=True, slots=True)
class Request:
    """The operations of one call. All members have the same, except for the values of the tensors."""

    buckets: Sequence[Bucket]
    reduction: Reduction
    quantization: Quantization | None

    @staticmethod
    def of(tensors: Sequence[Tensor], op: AnyReduceOp, quantization: Quantization | None) -> "Request":
        """Check the arguments of a call. Raises TypeError, ValueError."""
        reduction, buckets = Reduction.of(op), make_buckets("all_reduce", tensors)
        if quantization is not None:
            quantization = Quantization(quantization)
            for bucket in buckets:
                check_quantizable("all_reduce", bucket.dtype, reduction.name, quantization)
        return Request(buckets, reduction, quantization)

    @property
    def signature(self) -> str:
        """Describes the operations; equal on all members whose calls match."""
        sizes = [
            (str(bucket.dtype), bucket.indices, [tensor.numel() for tensor in bucket.tensors])
            for bucket in self.buckets
        ]
        return f"{self.reduction.name} {self.quantization} {sizes}"

    async def reduce_tagged(
        self, world: ViewWorld, operand: Tensor, result: Tensor, tag: int, counters: ByteCounters
    ) -> None:
        """Reduce one bucket over a channel with this tag: quantized or around the ring."""
        with TaggedChannel(world, tag, counters) as channel:
            if self.quantization is None:
                await ring_all_reduce(channel, operand, result, self.reduction)
            else:
                await quantized_all_reduce(channel, operand, result, self.reduction, self.quantization)


class RetryState:
    """The execution of one call on one member.

    Attributes:
        contributors: for each bucket, the number of members of the view in which it finished here last; 0 before.
        retries: how often unfinished operations were run again.
    """

    def __init__(self, request: Request, workspace: Workspace, counters: ByteCounters, max_in_flight: int) -> None:
        self.contributors = [0] * len(request.buckets)
        self.retries = 0
        self._request = request
        self._workspace = workspace
        self._results = workspace.allocate(request.buckets)
        self._counters = counters
        self._max_in_flight = max_in_flight

    async def run(self, world: ViewWorld, round_: Round) -> None:
        """Run the unfinished operations and mark those that finish. Wait for all operations in flight, even if some of them fail.

        Raises WorldError when the view has ended.
        """
        await run_window(round_.unfinished, self._max_in_flight, lambda index: self._reduce(world, index, round_))

    def renew(self, round_: Round) -> None:
        """Allocate new memory for the unfinished results: operations of the previous view may still write to the old memory."""
        self.retries += 1
        self._workspace.free()
        for index in round_.unfinished:
            self.contributors[index] = 0
            self._results[index] = torch.empty_like(self._results[index])

    def unpack(self, index: int) -> None:
        """Copy a result into its tensors. The operation has finished on all members."""
        self._request.buckets[index].unpack(self._results[index])

    async def _reduce(self, world: ViewWorld, index: int, round_: Round) -> None:
        request, bucket, result = self._request, self._request.buckets[index], self._results[index]
        if request.quantization is not None or prefers_ring(bucket.nbytes, world.size):
            await request.reduce_tagged(world, bucket.operand(), result, index, self._counters)
        else:
            bucket.pack(result)
            await direct_all_reduce(world, result, request.reduction, self._counters)
        self.contributors[index] = world.size
        round_.finished[index] = True


async def run_window(indices: Sequence[int], width: int, start: Callable[[int], Awaitable[None]]) -> None:
    """Run `start(index)` for all indices, in order, at most `width` at once. After an error nothing more is started.

    Waits until everything that was started has ended, then raises the first WorldError. Cancelling cancels what runs.
    """
    waiting = iter(indices)
    running: set[asyncio.Future[None]] = set()
    failure: WorldError | None = None
    try:
        while True:
            while failure is None and len(running) < width and (index := next(waiting, None)) is not None:
                running.add(asyncio.ensure_future(start(index)))
            if not running:
                break
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                try:
                    each.result()
                except WorldError as error:
                    failure = failure or error
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if failure is not None:
        raise failure
