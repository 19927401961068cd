"""The all-reduces of an elastic world: one with a handle, and many that survive the loss of members.

The latter run, agree on the finished operations, and run the others again. The agreement, and why the results are bitwise equal on all
survivors, is in multiworld/elastic/protocol/rounds.py.

Small tensors share a bucket, and a large tensor has its own. No tensor is written before its bucket has finished on all members. So the
tensors keep their original values until then, and nothing has to be restored.
"""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.collectives.allreduce import all_reduce
from multiworld.collectives.channel import CollectiveChannel
from multiworld.collectives.quantization import CASTS, UINT8, Quantization
from multiworld.collectives.reductions import AnyReduceOp
from multiworld.elastic.protocol.rounds import Round
from multiworld.errors import Cause, WorldError
from multiworld.execution.cuda import call_on
from multiworld.ops.buffers import RecvBuffer, check_dense, check_distinct, contiguous, flat
from multiworld.ops.operation import Collective, Status, status_of
from multiworld.ops.validation import tensor_signature
from multiworld.world import World

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)
BUCKET_BYTES = 1 << 20
"""Maximum bytes of a bucket with several tensors: large enough to share one transfer, small enough to repeat little after a failure."""
TAG_LIMIT = 1 << 28
"""Tags of `all_reduce_async` are below this limit. The numbers of the buckets of a call follow."""
_OPS = {"SUM": ReduceOp.SUM, "AVG": ReduceOp.AVG, "MIN": ReduceOp.MIN, "MAX": ReduceOp.MAX, "PRODUCT": ReduceOp.PRODUCT}
_QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)


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
    """Describes how a call ended.

    Attributes:
        success: all tensors hold their results. False when all other members left before that; then `world_size` is 1.
        tx_bytes, rx_bytes: bytes of tensors that this member sent and received, as encoded for transfer, in all-reduces that completed on
            this member. An all-reduce that is run again counts again.
        retries: how often unfinished operations were run again after a failure.
        world_size: number of members at the end of the call.
        contributors: for each tensor, the number of members that contributed to its result, which is the divisor of AVG; 0 if the tensor
            holds its original value.
    """

    success: bool
    tx_bytes: int
    rx_bytes: int
    retries: int
    world_size: int
    contributors: tuple[int, ...]


def make_buckets(tensors: Sequence[Tensor], quantization: Quantization | None = None) -> list[list[Tensor]]:
    """Group the tensors, in the given order, into buckets of one dtype and device that are reduced together.

    A tensor that is quantized to uint8 has its own bucket, so that its error depends on its own range.
    Raises TypeError, ValueError.
    """
    buckets: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        check_dense("all_reduce", tensor)
        if tensor.dtype not in DTYPES or (quantization is not None and not tensor.is_floating_point()):
            known = ", ".join(
                str(each).removeprefix("torch.") for each in DTYPES if not quantization or each.is_floating_point
            )
            raise TypeError(f"all_reduce: cannot reduce {tensor.dtype}; expected one of {known}")
        first = buckets[-1][0] if buckets else None
        size += tensor.nbytes
        full = size > BUCKET_BYTES or quantization in UINT8
        if first is None or full or (first.dtype, first.device) != (tensor.dtype, tensor.device):
            buckets.append([])
            size = tensor.nbytes
        buckets[-1].append(tensor)
    return buckets


def make_targets(tensors: Sequence[Tensor], receive: Sequence[Tensor] | None) -> list[Tensor]:
    """Return the tensors for the results, without their gradients. Raises TypeError, ValueError if a result cannot be written."""
    if receive is None:
        receive = tensors
    elif len(receive) != len(tensors):
        raise ValueError(
            f"all_reduce: expected a receiving tensor for each of {len(tensors)} tensors, got {len(receive)}"
        )
    for tensor, target in zip(tensors, receive, strict=True):
        check_dense("all_reduce", target)
        if (tensor.dtype, tensor.device, tensor.shape) != (target.dtype, target.device, target.shape):
            raise ValueError(
                f"all_reduce: expected a receiving tensor {tensor.dtype} {[*tensor.shape]} on {tensor.device}, "
                f"got {target.dtype} {[*target.shape]} on {target.device}"
            )
    targets = [RecvBuffer("all_reduce", target, on_host=False).tensor for target in receive]
    check_distinct("all_reduce", targets)
    return targets


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
        receive: tensors for the results; None writes them into `tensors`.
        quantization: format of the transfers; None sends the dtype of the tensors.
        memory: memory of results, by bucket, from earlier calls whose tensors are written. It is used again, because new memory costs more
            time than the transfer, and grows to the largest bucket.
    Attributes:
        contributors: for each bucket, the number of members of the view in which it finished here last; 0 before.
        tx_bytes, rx_bytes: as in `AllReduceOutcome`.
        runs: how often unfinished operations were run.

    Raises TypeError, ValueError for invalid arguments.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        op: AnyReduceOp,
        receive: Sequence[Tensor] | None,
        quantization: Quantization | None,
        memory: dict[int, Tensor],
    ) -> None:
        names = [name for name, known in _OPS.items() if op == known]
        if not names:
            raise ValueError(f"all_reduce: {op!s:.40} is not supported, only {', '.join(_OPS)}")
        if quantization is not None and quantization not in _QUANTIZATIONS:
            raise ValueError(
                f"all_reduce: quantization must be None or one of {', '.join(_QUANTIZATIONS)}, got {quantization!r:.40}"
            )
        if quantization in UINT8 and names[0] == "PRODUCT":
            raise ValueError(
                f"all_reduce: the error of a product has no bound with quantization {quantization}; use None or bfloat16"
            )
        self.buckets = make_buckets(tensors, quantization)
        targets = iter(make_targets(tensors, receive))
        self._targets = [list(itertools.islice(targets, len(bucket))) for bucket in self.buckets]
        self.tx_bytes = self.rx_bytes = 0
        self.contributors = [0] * len(self.buckets)
        self.runs = 0
        self._op = names[0]
        self._quantization = quantization
        self._memory = memory
        self._results: dict[int, Tensor] = {}

    @property
    def signature(self) -> str:
        """Describes the operations; equal on all members whose calls match."""
        sizes = [(str(bucket[0].dtype), [tensor.numel() for tensor in bucket]) for bucket in self.buckets]
        return f"{self._op} {self._quantization} {sizes}"

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
        dtype = str(result.dtype).removeprefix("torch.")
        wire_format = self._quantization or (dtype if dtype in CASTS else None)

        def algorithm() -> Callable[[CollectiveChannel], Coroutine[Any, Any, None]]:
            data = flatten(bucket)

            async def reduce(channel: CollectiveChannel) -> None:
                await all_reduce(channel, data, result, self._op, wire_format)
                self.tx_bytes += channel.tx_bytes
                self.rx_bytes += channel.rx_bytes

            return reduce

        arguments = [tensor_signature(result), self._op, *([self._quantization] if self._quantization else [])]
        operation = Collective(
            signature=f"all_reduce({', '.join(arguments)})",
            algorithm=algorithm,
            tensors=tuple(bucket),
            staged=bucket[0].is_cuda,  # the copy from a device may block, so it runs on a thread
            number=number,
        )
        await world.start(operation).finish()
        self._memory[index] = memory
        self.contributors[index] = world.size

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

    async def unpack(self, index: int) -> None:
        """Copy a result into its tensors. The operation has finished on all members."""
        targets, result = self._targets[index], self._results.pop(index)
        if targets[0].is_cuda:  # the copy may block
            stream = torch.cuda.current_stream(targets[0].device)
            await asyncio.to_thread(call_on, stream, partial(write_back, targets, result))
        else:
            write_back(targets, result)
