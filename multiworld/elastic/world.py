"""`ElasticWorld`: the operations and the membership of one member."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.collectives.reductions import AnyReduceOp
from multiworld.elastic.agent import MemberAgent
from multiworld.elastic.allreduce.bucket import Workspace, bundles
from multiworld.elastic.allreduce.channel import Epoch, Traffic
from multiworld.elastic.allreduce.quantization import Quantization, check_quantisable
from multiworld.elastic.allreduce.quantized import quantised_all_reduce
from multiworld.elastic.allreduce.reduction import Reduction
from multiworld.elastic.allreduce.ring import ring_all_reduce
from multiworld.elastic.errors import ElasticError
from multiworld.elastic.handle import AllReduceHandle
from multiworld.elastic.protocol.commit_protocol import (
    Await,
    Course,
    EpochOver,
    Exchange,
    Run,
    Stand,
    Step,
    agree,
    conduct,
    pass_boundary,
)
from multiworld.elastic.protocol.rounds import Round, RoundMismatch
from multiworld.elastic.retry import AllReduceOutcome, Attempts, Job
from multiworld.errors import BrokenWorldException, Cause, WorldError
from multiworld.manager import WorldManager
from multiworld.ops.validation import check_tag

_OWN_TAGS = 1 << 28
"""First tag of `all_reduce_async`. The operations with retry use the tags below it."""


class ElasticWorld:
    """One member's end of an elastic world. `ElasticManager.join` returns it.

    `rank`, `size` and `members` are valid for one *epoch*. When a member is lost, the survivors form the next epoch automatically.
    Newcomers join when all members await `update_membership`. All members must make the same calls in the same order, one at a time.

    After a call raises an ElasticError or is cancelled, this process is no longer a member and the others go on. The exception is a
    RendezvousError of `update_membership`, see there.
    """

    def __init__(self, manager: WorldManager, world_name: str, keeper: MemberAgent) -> None:
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
        """Number of the epoch that is ready or forming. It only increases."""
        return self._seat.epoch

    @property
    def size(self) -> int:
        """Number of members of this epoch."""
        return len(self._seat.view.members)

    @property
    def rank(self) -> int:
        """This member's rank in this epoch. Members are ordered by age: the oldest member has rank 0."""
        return self._seat.view.rank_of(self._seat.id)

    @property
    def member_id(self) -> str:
        """The id of this member. It stays the same in all epochs."""
        return self._seat.id

    @property
    def members(self) -> tuple[str, ...]:
        """The ids of all members of this epoch, ordered by rank."""
        return self._seat.view.ids()

    async def update_membership(self, *, timeout_s: float = 60.0) -> int:
        """Admit newcomers that wait at the rendezvous, if there are any. All members call it between two operations.

        Returns:
            The number of the epoch that follows; the current one if no newcomer waits.
        Raises:
            ElasticError: not all members made this call within `timeout_s` seconds, or this process is no longer a member.
            DesyncError: another member called another operation. All members raise it.
            RendezvousError: the rendezvous cannot be reached. If the current epoch still works, this process stays a member of it.
        """
        async with self._call("update_membership", timeout_s):
            await self._follow(pass_boundary(self._seat))
            return (await self._keeper.next_epoch(0)).epoch

    async def reformed(self, after: int) -> int:
        """Wait until an epoch later than `after`, which is broken, is ready; return its number. Raises ElasticError if none forms."""
        return (await self._keeper.next_epoch(after)).epoch

    async def leave(self) -> None:
        """Leave the world and free all resources. The others form the next epoch. Idempotent."""
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
        """All-reduce many tensors, in place. If members are lost, the survivors complete the operation.

        After a failure, the call waits for the operations in flight. The survivors form the next epoch, agree on the operations that
        finished on all of them, and run the others again from the original tensors. The results are bitwise equal on all survivors.

        Args:
            tensors: float32, float64, bfloat16, int32 or int64, of any shape and device; same dtypes and sizes on all members.
            op: SUM, AVG (over the members that contributed to that tensor), MIN, MAX or PRODUCT.
            max_in_flight: number of all-reduces that run at once; small tensors share one.
            quantization: format of the transfers; the error bounds are in multiworld/elastic/allreduce/quantization.py and quantized.py.
            timeout_s: seconds for the whole call; None waits without limit for a member that is alive but does not make the call.
        Raises:
            ElasticError: this process is no longer a member. The tensors hold their original values.
            DesyncError: the members passed different tensors or operations. All members raise it.
            TypeError, ValueError: invalid arguments; nothing was sent.
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
        """`all_reduce_multiple_with_retry` for one tensor."""
        return await self.all_reduce_multiple_with_retry([tensor], op, quantization=quantization, timeout_s=timeout_s)

    # -- building blocks -----------------------------------------------------------------------------------------------------------

    def all_reduce_async(
        self,
        tensor: Tensor,
        op: AnyReduceOp = ReduceOp.SUM,
        *,
        tag: int = 0,
        quantization: Quantization | None = None,
    ) -> AllReduceHandle:
        """Start an all-reduce in this epoch, in place, and return at once.

        The tensor is written when the result is complete on this member. It may not be complete on the others, and some of them may be
        lost: `agree` tells. In a world of one member, the tensor stays as it is.

        Args:
            tensor: as for `all_reduce_multiple_with_retry`.
            tag: identifies the all-reduce: below 2**28, unique among those in flight, and the same on all members.
        Raises:
            BrokenWorldException: this epoch is over. Await `reformed`.
            ElasticError: this process is no longer a member.
            TypeError, ValueError: invalid arguments; nothing was sent.
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
        """Return, for each operation, whether it finished on all members. If all did, the round is closed and the originals may be freed.

        Call it in each epoch before and after the operations run. The rules are in multiworld/elastic/protocol/rounds.py.

        Args:
            finished: for each operation, whether it finished on this member.
        Raises:
            BrokenWorldException: this epoch is over. Await `reformed` and call it again with the same flags.
            ElasticError: this process is no longer a member.
            ValueError: the number of flags differs from that of the open round.
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
                if await self._follow(agree(self._seat, round_, epoch)):
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

    async def _follow(self, course: Course, round_: Round | None = None, attempts: Attempts | None = None) -> bool:
        """Perform the steps of a commit protocol and return its result.

        Args:
            round_, attempts: the round and its operations, if the protocol runs any.
        Raises:
            ElasticError: this process is no longer a member, or the rendezvous cannot be reached.
            EpochOver: the epoch is over, and the protocol does not wait for another one.
        """
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

    async def _perform(self, step: Step, round_: Round | None, attempts: Attempts | None) -> Any:
        """Perform one step. Raises WorldError when the epoch is over, ElasticError when this process is no longer a member."""
        match step:
            case Await(after):
                return (await self._keeper.next_epoch(after)).epoch
            case Exchange(epoch, data):
                return await self._exchange(self._in(epoch), data)
            case Stand(epoch):
                await self._keeper.stand_at_boundary(epoch)
            case Run(epoch, again) if round_ is not None and attempts is not None:
                if again:
                    attempts.renew(round_)
                await attempts.run(self._in(epoch), round_)
        return None

    async def _exchange(self, epoch: Epoch, data: bytes) -> list[bytes]:
        """All-gather `data`, of the same length on all members; return the data of every member, ordered by rank."""
        if epoch.size == 1 or not data:
            return [data] * epoch.size
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        said = torch.empty(epoch.size * len(data), dtype=torch.uint8)
        await epoch.all_gather(said, own)
        return [said[at : at + len(data)].numpy().tobytes() for at in range(0, said.numel(), len(data))]

    def _in(self, epoch: int) -> Epoch:
        """Return the `Epoch`. Raises BrokenWorldException when it is over, ElasticError when this process is no longer a member."""
        self._keeper.raise_if_out()
        if not self._seat.is_in(epoch):
            raise BrokenWorldException(self.name, Cause.ABORTED, -1, f"epoch {epoch} is over, or forming")
        world = self._manager.world(self.name) if self.size > 1 else None
        if world is not None and world.epoch != epoch:
            raise BrokenWorldException(self.name, Cause.ABORTED, -1, f"epoch {epoch} is over")
        return Epoch(epoch, self.rank, self.size, world)

    @contextlib.asynccontextmanager
    async def _call(self, what: str, timeout_s: float | None, *, last: bool = True) -> AsyncIterator[None]:
        """Serialise the calls. After a timeout, a cancellation or an unexpected error this member leaves, because it is out of step."""
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
