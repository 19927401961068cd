"""Runs many all-reduces that survive the loss of members: run, agree on the finished ones, run the others again.

The agreement, and why the results are bitwise equal on all survivors, is in multiworld/elastic/protocol/rounds.py.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import torch

from multiworld.elastic.allreduce.bucket import Bucket, Workspace
from multiworld.elastic.allreduce.channel import Epoch, Traffic
from multiworld.elastic.allreduce.quantization import Quantization
from multiworld.elastic.allreduce.quantized import quantised_all_reduce
from multiworld.elastic.allreduce.reduction import Reduction
from multiworld.elastic.allreduce.ring import direct_all_reduce, prefers_ring, ring_all_reduce
from multiworld.elastic.protocol.rounds import Round
from multiworld.errors import WorldError


@dataclass(frozen=True, slots=True)
class AllReduceOutcome:
    """The outcome of a call.

    Attributes:
        success: all tensors hold their results. False when all other members left before that; then `world_size` is 1.
        bytes_sent, bytes_received: bytes of tensors that this member sent and received, failed attempts included.
        retries: how often unfinished operations were run again after a failure.
        world_size: number of members at the end of the call.
        took_part: for each tensor, the number of members that contributed to its result, which is the divisor of AVG; 0 if the tensor
            holds its original value.
    """

    success: bool
    bytes_sent: int
    bytes_received: int
    retries: int
    world_size: int
    took_part: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """The operations of one call. All members have the same, except for the values of the tensors."""

    bundles: Sequence[Bucket]
    reduction: Reduction
    quantization: Quantization | None
    max_in_flight: int

    @property
    def signature(self) -> str:
        """Describes the operations; equal on all members whose calls match."""
        sizes = [
            (str(bundle.dtype), bundle.indices, [tensor.numel() for tensor in bundle.tensors])
            for bundle in self.bundles
        ]
        return f"{self.reduction.name} {self.quantization} {sizes}"


class Attempts:
    """The execution of one call on one member.

    Attributes:
        sizes: for each bucket, the number of members of the epoch in which it finished here last; 0 before.
        retries: how often unfinished operations were run again.
    """

    def __init__(self, job: Job, workspace: Workspace, traffic: Traffic) -> None:
        self.sizes = [0] * len(job.bundles)
        self.retries = 0
        self._job = job
        self._workspace = workspace
        self._results = workspace.room_for(job.bundles)
        self._traffic = traffic

    async def run(self, epoch: Epoch, round_: Round) -> None:
        """Run the unfinished operations and mark those that finish. Wait for all operations in flight, even if some of them fail.

        Raises WorldError when the epoch is over.
        """
        await in_window(round_.unfinished, self._job.max_in_flight, lambda index: self._reduce(epoch, index, round_))

    def renew(self, round_: Round) -> None:
        """Allocate new memory for the unfinished results: operations of the previous epoch may still write to the old memory."""
        self.retries += 1
        self._workspace.free()
        for index in round_.unfinished:
            self.sizes[index] = 0
            self._results[index] = torch.empty_like(self._results[index])

    def deliver(self, index: int) -> None:
        """Copy a result into its tensors. The operation has finished on all members."""
        self._job.bundles[index].deliver(self._results[index])

    async def _reduce(self, epoch: Epoch, index: int, round_: Round) -> None:
        job, bundle, result = self._job, self._job.bundles[index], self._results[index]
        if job.quantization is not None:
            operand = bundle.operand()
            await quantised_all_reduce(epoch, operand, result, job.reduction, job.quantization, index, self._traffic)
        elif prefers_ring(bundle.nbytes, epoch.size):
            await ring_all_reduce(epoch, bundle.operand(), result, job.reduction, index, self._traffic)
        else:
            bundle.pack(result)
            await direct_all_reduce(epoch, result, result, job.reduction, self._traffic)
        self.sizes[index] = epoch.size
        round_.finish(index)


async def in_window(indices: Sequence[int], width: int, start: Callable[[int], Awaitable[None]]) -> None:
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
