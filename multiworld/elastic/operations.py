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
from torch.distributed import ReduceOp

from multiworld.collectives.allreduce import bytes_sent
from multiworld.collectives.reductions import AnyReduceOp, all_reduce_out
from multiworld.elastic.buckets import Bucket, Workspace, make_buckets
from multiworld.elastic.protocol.rounds import Round
from multiworld.errors import WorldError
from multiworld.world import World

Status = Literal["pending", "done", "failed"]
_OPS = {"SUM": ReduceOp.SUM, "AVG": ReduceOp.AVG, "MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX, "PRODUCT": ReduceOp.PRODUCT}


@dataclass(slots=True)
class ByteCounters:
    """Bytes of tensors that this member has sent and received. Incomplete all-reduces do not count."""

    sent: int = 0
    received: int = 0


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
    """The operations of one call. All members have the same, except for the values of the tensors.

    Attributes:
        op: name of the reduction. AVG is the sum divided by the number of members that contributed, for integers rounded towards zero.
    """

    buckets: Sequence[Bucket]
    op: str

    @staticmethod
    def of(tensors: Sequence[Tensor], op: AnyReduceOp) -> "Request":
        """Check the arguments of a call. Raises TypeError, ValueError."""
        for name, known in _OPS.items():
            if op == known:
                return Request(make_buckets("all_reduce", tensors), name)
        raise ValueError(f"all_reduce: {op} is not supported, only {', '.join(_OPS)}")

    @property
    def signature(self) -> str:
        """Describes the operations; equal on all members whose calls match."""
        sizes = [
            (str(bucket.dtype), bucket.indices, [tensor.numel() for tensor in bucket.tensors])
            for bucket in self.buckets
        ]
        return f"{self.op} {sizes}"

    async def reduce(
        self, world: World, bucket: Bucket, result: Tensor, counters: ByteCounters, number: int | None = None
    ) -> None:
        """Reduce one bucket of all members into `result`, flat on the host. The tensors of the bucket are only read.

        Args:
            number: identifies the operation; None: the members start their operations in the same order.
        Raises BrokenWorldException when the view has ended; `result` is undefined then.
        """
        truncated = self.op == "AVG" and not bucket.dtype.is_floating_point
        op = ReduceOp.SUM if truncated else _OPS[self.op]
        await world.start(all_reduce_out(bucket.operand(), result, op, number)).finish()
        if truncated:
            with torch.inference_mode():
                result.div_(world.size, rounding_mode="trunc")
        moved = bytes_sent(bucket.nbytes, world.size)
        counters.sent += moved
        counters.received += moved


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

    async def run(self, world: World, round_: Round) -> None:
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

    async def _reduce(self, world: World, index: int, round_: Round) -> None:
        bucket, result = self._request.buckets[index], self._results[index]
        await self._request.reduce(world, bucket, result, self._counters)
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
