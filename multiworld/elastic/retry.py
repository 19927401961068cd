"""Many all-reduces at once that survive the loss of members: run, agree on what has finished, run the rest again.

What is agreed on, and why all survivors hold the same bits, is in multiworld/elastic/rounds.py.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import torch

from multiworld.elastic.bundle import Bundle, Workspace
from multiworld.elastic.epoch import Epoch, Traffic
from multiworld.elastic.exchange import quantised_all_reduce
from multiworld.elastic.quantise import Quantization
from multiworld.elastic.reduction import Reduction
from multiworld.elastic.ring import gloo_all_reduce, prefers_ring, ring_all_reduce
from multiworld.elastic.rounds import Round
from multiworld.errors import WorldError


@dataclass(frozen=True, slots=True)
class AllReduceOutcome:
    """What became of a call.

    Attributes:
        success: all tensors hold their results. False when everybody else had left before that (`world_size` is 1 then).
        bytes_sent, bytes_received: of tensors, by this member, attempts that failed included.
        retries: how often what was unfinished was run again, after a failure.
        world_size: members that are left.
        took_part: for each tensor how many members its result is made of, which is what AVG divided by; 0 where it holds what it held.
    """

    success: bool
    bytes_sent: int
    bytes_received: int
    retries: int
    world_size: int
    took_part: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Job:
    """What a call is to do; the same at all members but for what the tensors hold."""

    bundles: Sequence[Bundle]
    reduction: Reduction
    quantization: Quantization | None
    max_in_flight: int

    @property
    def signature(self) -> str:
        sizes = [(str(bundle.dtype), [tensor.numel() for tensor in bundle.tensors]) for bundle in self.bundles]
        return f"{self.reduction.name} {self.quantization} {sizes}"


class Attempts:
    """One call at one member.

    Attributes:
        sizes: for each bundle in how large an epoch it finished here last.
        retries: how often what was unfinished was run again.
    """

    def __init__(self, job: Job, workspace: Workspace, traffic: Traffic) -> None:
        self.sizes = [0] * len(job.bundles)
        self.retries = 0
        self._job = job
        self._workspace = workspace
        self._results = workspace.room_for(job.bundles)
        self._traffic = traffic

    async def run(self, epoch: Epoch, round_: Round) -> None:
        """Run what is unfinished, and mark what finishes. Waits for all that is under way, also when some of it fails.

        Raises WorldError when the epoch is over.
        """
        await in_window(round_.unfinished, self._job.max_in_flight, lambda index: self._reduce(epoch, index, round_))

    def renew(self, round_: Round) -> None:
        """Have what is unfinished written elsewhere: Gloo may not have let go of the memory that it was to write to."""
        self.retries += 1
        self._workspace.free()
        for index in round_.unfinished:
            self.sizes[index] = 0
            self._results[index] = torch.empty_like(self._results[index])

    def deliver(self, index: int) -> None:
        """Write a result into its tensors: it has finished at all members."""
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
            await gloo_all_reduce(epoch, result, result, job.reduction, self._traffic)
        self.sizes[index] = epoch.size
        round_.finish(index)


async def in_window(indices: Sequence[int], width: int, start: Callable[[int], Awaitable[None]]) -> None:
    """Do `start(index)` for all, in order, at most `width` at once. After an error nothing more is started, and what runs is awaited.

    Raises the first WorldError. Cancelling cancels what runs.
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
