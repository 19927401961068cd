"""An elastic world: members come and go while it lives."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.arguments import check_tag
from multiworld.elastic.bundle import Workspace, bundles
from multiworld.elastic.call import Await, Course, EpochOver, Exchange, Run, Step, agree, conduct
from multiworld.elastic.epoch import Epoch, Traffic
from multiworld.elastic.errors import ElasticError
from multiworld.elastic.exchange import quantised_all_reduce
from multiworld.elastic.handle import AllReduceHandle
from multiworld.elastic.keeper import Keeper
from multiworld.elastic.quantise import Quantization, check_quantisable
from multiworld.elastic.reduction import Reduction
from multiworld.elastic.retry import AllReduceOutcome, Attempts, Job
from multiworld.elastic.ring import ring_all_reduce
from multiworld.elastic.rounds import Round, RoundMismatch
from multiworld.errors import BrokenWorldException, Cause, WorldError
from multiworld.reductions import AnyReduceOp
from multiworld.world_manager import WorldManager

_OWN_TAGS = 1 << 28
"""Tags of `all_reduce_async` are from here on; those below are of the calls that retry."""


class ElasticWorld:
    """One member's end of an elastic world. Made by `ElasticManager.join`.

    Its rank, its size and its members hold for one *epoch*. When a member is lost, the others form the next epoch by themselves. Newcomers
    come in when all members await `update_membership`. All members must make the same calls in the same order, one at a time.

    Once a call of it has raised an ElasticError, or was cancelled, this process is no member any more; the others go on.
    """

    def __init__(self, manager: WorldManager, world_name: str, keeper: Keeper) -> None:
        self.name = world_name
        self._manager = manager
        self._keeper = keeper
        self._seat = keeper.seat
        self._calling = asyncio.Lock()
        self._workspace = Workspace()
        self._round: Round | None = None

    def __repr__(self) -> str:
        return f"<ElasticWorld {self.name!r} epoch={self.epoch} rank={self.rank}/{self.size} {self._seat.state}>"

    # -- membership --------------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Which incarnation it is in, or is forming. Only ever grows."""
        return self._seat.epoch

    @property
    def size(self) -> int:
        """How many members this epoch has."""
        return len(self._seat.view.members)

    @property
    def rank(self) -> int:
        """Our rank in this epoch: members keep their order, the one of longest standing first."""
        return self._seat.view.rank_of(self._seat.id)

    @property
    def member_id(self) -> str:
        """Ours for as long as we are a member."""
        return self._seat.id

    @property
    def members(self) -> tuple[str, ...]:
        """The ids of all members of this epoch, by rank."""
        return self._seat.view.ids()

    async def update_membership(self, *, timeout_s: float = 60.0) -> int:
        """Let in who waits, if anybody does. All members call it between two operations; gives the epoch that follows.

        Raises:
            ElasticError: not all came within `timeout_s`, or this process is no member any more.
            RendezvousError: the rendezvous cannot be reached; when it says so of an epoch that is well, that goes on.
        """
        async with self._call("update_membership", timeout_s=None):
            await self._keeper.pass_boundary(timeout_s)
            return (await self._keeper.next_epoch(0)).epoch

    async def reformed(self, after: int) -> int:
        """Wait for an epoch later than `after`, which is broken; gives it. Raises ElasticError when none comes."""
        return (await self._keeper.next_epoch(after)).epoch

    async def leave(self) -> None:
        """Say goodbye, and free everything. The others form the next epoch. Idempotent."""
        await self._keeper.close()
        self._workspace.free()

    # -- operations that survive a failure ---------------------------------------------------------------------------------------

    async def all_reduce_multiple_with_retry(
        self,
        tensors: Sequence[Tensor],
        op: AnyReduceOp = ReduceOp.SUM,
        *,
        max_in_flight: int = 16,
        quantization: Quantization | None = None,
        timeout_s: float | None = None,
    ) -> AllReduceOutcome:
        """All-reduce many tensors at once, in place. Who is lost meanwhile is done without.

        After a failure, all that is under way is awaited, the survivors form the next epoch and agree on what has finished at all of them,
        and the rest is run again from what the tensors held. Each result is the same at all survivors, bit for bit.

        Args:
            tensors: float32, float64, bfloat16, int32 or int64, of any shape and device; the same dtypes and sizes at all members.
            op: SUM, AVG (of those who took part in that tensor), MIN, MAX or PRODUCT.
            max_in_flight: how many all-reduces run at once; tensors that are small share one.
            quantization: how they travel; its error is stated in multiworld/elastic/quantise.py and exchange.py.
            timeout_s: how long it may take, everything included; None waits for a member that is alive but does not come.
        Raises:
            ElasticError: this process is no member any more. The tensors hold what they held before.
            DesyncError: the members gave different tensors or operations; at all of them.
            TypeError, ValueError: arguments that cannot be right, before anything was sent.
        """
        job = self._job(tensors, op, max_in_flight, quantization)
        async with self._call("all_reduce", timeout_s):
            return await self._run(job, len(tensors))

    async def all_reduce_with_retry(
        self,
        tensor: Tensor,
        op: AnyReduceOp = ReduceOp.SUM,
        *,
        quantization: Quantization | None = None,
        timeout_s: float | None = None,
    ) -> AllReduceOutcome:
        """`all_reduce_multiple_with_retry` of one tensor."""
        return await self.all_reduce_multiple_with_retry([tensor], op, quantization=quantization, timeout_s=timeout_s)

    # -- what they are made of -----------------------------------------------------------------------------------------------------

    def all_reduce_async(
        self,
        tensor: Tensor,
        op: AnyReduceOp = ReduceOp.SUM,
        *,
        tag: int = 0,
        quantization: Quantization | None = None,
    ) -> AllReduceHandle:
        """Start an all-reduce in this epoch, and return at once. In place; the tensor is written to when its own result is there.

        That it is done here does not say that it is at the others, some of which may be lost: `agree` tells. Of a world of one, the result
        is the tensor.

        Args:
            tag: which one it is, below 2**28; at one time each tag once, and the same at all members.
        Raises BrokenWorldException when this epoch is over: await `reformed`.
        """
        check_tag("all_reduce_async", tag + _OWN_TAGS)
        job = self._job([tensor], op, 1, quantization)
        epoch, traffic = self._in(self.epoch), Traffic()

        async def reduce() -> None:
            for bundle in job.bundles if epoch.size > 1 else ():
                operand = bundle.operand()
                result = torch.empty_like(operand)
                if quantization is None:
                    await ring_all_reduce(epoch, operand, result, job.reduction, _OWN_TAGS + tag, traffic)
                else:
                    await quantised_all_reduce(
                        epoch, operand, result, job.reduction, quantization, _OWN_TAGS + tag, traffic
                    )
                bundle.deliver(result)

        return AllReduceHandle(reduce(), epoch.number, epoch.size, traffic)

    async def agree(self, finished: Sequence[bool]) -> list[bool]:
        """Which of some operations have finished at all members. When all have, the round is closed, and the originals may go.

        Call it in each epoch before operations run and after they have: the rules are in multiworld/elastic/rounds.py.

        Raises:
            BrokenWorldException: this epoch is over. Await `reformed` and call it again, with the same flags.
            ElasticError: this process is no member any more.
        """
        async with self._call("agree", timeout_s=None, last=False):
            if self._round is None:
                self._round = Round(self._seat.closed, len(finished), f"agree on {len(finished)}")
            round_ = self._round
            if len(finished) != len(round_.finished):
                raise ValueError(f"agree: {len(finished)} flags, the round has {len(round_.finished)}")
            round_.finished = list(finished)
            epoch = self.epoch
            try:
                if await self._follow(agree(self._seat, round_, epoch), round_):
                    self._round = None
            except EpochOver:
                raise BrokenWorldException(self.name, Cause.ABORTED, -1, f"epoch {epoch} is over") from None
            return list(round_.finished)

    # -- inside --------------------------------------------------------------------------------------------------------------------

    def _job(
        self, tensors: Sequence[Tensor], op: AnyReduceOp, max_in_flight: int, quantization: Quantization | None
    ) -> Job:
        if max_in_flight < 1:
            raise ValueError(f"all_reduce: max_in_flight must be at least 1, got {max_in_flight}")
        reduction, made = Reduction.of(op), bundles("all_reduce", tensors)
        if quantization is not None:
            quantization = Quantization(quantization)
            for bundle in made:
                check_quantisable("all_reduce", bundle.dtype, reduction.name, quantization)
        return Job(made, reduction, quantization, max_in_flight)

    async def _run(self, job: Job, count: int) -> AllReduceOutcome:
        traffic = Traffic()
        round_ = Round(self._seat.closed, len(job.bundles), job.signature)
        attempts = Attempts(job, self._workspace, traffic)
        success = await self._follow(conduct(self._seat, round_), round_, attempts)
        took_part = [self.size if success else 0] * count
        for index, bundle in enumerate(job.bundles):
            size = attempts.sizes[index] if round_.finished[index] else 0
            if size:
                attempts.deliver(index)
            for place in bundle.indices:
                took_part[place] = size
        return AllReduceOutcome(success, traffic.sent, traffic.received, attempts.retries, self.size, tuple(took_part))

    async def _follow(self, course: Course, round_: Round, attempts: Attempts | None = None) -> bool:
        """Do what a call wants done. Raises ElasticError; and for a course that does not wait for another epoch, EpochOver."""
        came: Any = None
        over = False
        while True:
            try:
                step = course.throw(EpochOver()) if over else course.send(came)
            except StopIteration as end:
                return bool(end.value)
            except RoundMismatch as mismatch:
                self._keeper.perform(self._seat.give_up("desync", f"rank {mismatch.rank}: {mismatch.detail}"))
                self._keeper.raise_if_out()
            try:
                came, over = await self._perform(step, round_, attempts), False
            except ElasticError:
                raise
            except WorldError:
                over = True

    async def _perform(self, step: Step, round_: Round, attempts: Attempts | None) -> Any:
        """Raises WorldError when the epoch is over, ElasticError when we are no member any more."""
        match step:
            case Await(after):
                return (await self._keeper.next_epoch(after)).epoch
            case Exchange(epoch, data):
                return await self._exchange(self._in(epoch), data)
            case Run(epoch, again) if attempts is not None:
                if again:
                    attempts.renew(round_)
                await attempts.run(self._in(epoch), round_)
        return None

    async def _exchange(self, epoch: Epoch, data: bytes) -> list[bytes]:
        """What every member says, by rank."""
        if epoch.size == 1 or not data:
            return [data] * epoch.size
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        said = torch.empty(epoch.size * len(data), dtype=torch.uint8)
        await epoch.all_gather(said, own)
        return [said[at : at + len(data)].numpy().tobytes() for at in range(0, said.numel(), len(data))]

    def _in(self, epoch: int) -> Epoch:
        """That epoch. Raises BrokenWorldException when it is over, ElasticError when we are no member any more."""
        self._keeper.raise_if_out()
        if not self._seat.is_in(epoch):
            raise BrokenWorldException(self.name, Cause.ABORTED, -1, f"epoch {epoch} is over, or forming")
        world = self._manager.world(self.name) if self.size > 1 else None
        if world is not None and world.epoch != epoch:
            raise BrokenWorldException(self.name, Cause.ABORTED, -1, f"epoch {epoch} is over")
        return Epoch(epoch, self.rank, self.size, world)

    @contextlib.asynccontextmanager
    async def _call(self, what: str, timeout_s: float | None, *, last: bool = True) -> AsyncIterator[None]:
        """One call at a time. Who does not come to its end cannot be in step with the others any more, and leaves."""
        async with self._calling:
            self._keeper.raise_if_out()
            try:
                async with asyncio.timeout(timeout_s):
                    yield
            except TimeoutError:
                detail = f"{what} took over {timeout_s:g} s"
                self._keeper.perform(self._seat.give_up("reform", detail))
                self._keeper.raise_if_out()
            except BaseException as error:
                if not isinstance(error, WorldError | ValueError):
                    self._keeper.perform(self._seat.give_up("left", f"{what} ended with {type(error).__name__}"))
                raise
