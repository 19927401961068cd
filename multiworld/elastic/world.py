"""`ElasticWorld`: the operations and the membership of one member."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.collectives.quantization import Quantization
from multiworld.collectives.reductions import AnyReduceOp
from multiworld.elastic.agent import MemberAgent
from multiworld.elastic.calls import TAG_LIMIT, AllReduceCall, AllReduceHandle, AllReduceOutcome
from multiworld.elastic.protocol.commit_protocol import agree, pass_boundary, run_round
from multiworld.elastic.protocol.rounds import Round
from multiworld.errors import DesyncError, ElasticError, ViewChangeError, WorldError
from multiworld.execution.failures import MismatchError


class ElasticWorld:
    """One member's end of an elastic world. `ElasticManager.join` returns it.

    `rank`, `size` and `members` are valid for one *view*. When a member is lost, the survivors form the next view automatically.
    New members join when all members await `update_membership`. All members must make the same calls in the same order, one at a time.

    After a call raises an ElasticError or is cancelled, this process is no longer a member and the others continue.
    Until `leave`, the world keeps memory for results, as large as the tensors of the largest call.
    """

    def __init__(self, world_name: str, agent: MemberAgent) -> None:
        self.name = world_name
        self._agent = agent
        self._state = agent.state
        self._call_lock = asyncio.Lock()
        self._memory: dict[int, Tensor] = {}  # see `AllReduceCall`
        self._round: Round | None = None
        self._async_tags: set[tuple[int, int]] = set()  # view number and tag of each `all_reduce_async` in flight

    def __repr__(self) -> str:
        return f"<ElasticWorld {self.name!r} view={self.view_number} rank={self.rank}/{self.size} {self._state.phase}>"

    # -- membership ----------------------------------------------------------------------------------------------------

    @property
    def view_number(self) -> int:
        """Number of the view that is ready or forming. It only increases."""
        return self._state.view.number

    @property
    def size(self) -> int:
        """Number of members of this view."""
        return len(self._state.view.members)

    @property
    def rank(self) -> int:
        """Return this member's rank in this view. Members are ordered by age: the oldest member has rank 0."""
        return self._state.view.rank_of(self._state.id)

    @property
    def member_id(self) -> str:
        """Return the id of this member. It stays the same in all views."""
        return self._state.id

    @property
    def members(self) -> tuple[str, ...]:
        """Return the ids of all members of this view, ordered by rank."""
        return self._state.view.ids()

    async def update_membership(self, *, timeout_s: float = 60.0) -> int:
        """Admit new members that wait at the rendezvous server, if there are any. All members call it between two operations.

        Returns:
            The number of the view that follows; the current one if no new member waits. The rendezvous server is not asked: a member that
            has just arrived may have to wait for the next call.
        Raises:
            ElasticError: not all members made this call within `timeout_s` seconds, or this process is no longer a member.
            DesyncError: another member called another operation. All members raise it.
        """
        async with self._call("update_membership", timeout_s):
            await pass_boundary(self._agent)
            return await self.next_view(0)

    async def next_view(self, after: int) -> int:
        """Wait until a view later than `after`, which is broken, is ready; return its number. Raises ElasticError if none forms."""
        return await self._agent.next_view(after)

    async def leave(self) -> None:
        """Leave the world and free all resources. The others form the next view. Idempotent."""
        await self._agent.close()
        self._memory.clear()

    # -- operations that survive a failure -----------------------------------------------------------------------------

    async def all_reduce_multiple_with_retry(
        self,
        tensors: Sequence[Tensor],
        op: AnyReduceOp = ReduceOp.SUM,
        *,
        receive: Sequence[Tensor] | None = None,
        quantization: Quantization | None = None,
        max_in_flight: int = 16,
        timeout_s: float | None = None,
    ) -> AllReduceOutcome:
        """All-reduce many tensors, in place or into other tensors. If members are lost, the survivors complete the operation.

        After a failure, the call waits for the operations in flight. The survivors form the next view, agree on the operations that
        finished on all of them, and run the others again from the original tensors. The results are bitwise equal on all survivors.

        Args:
            tensors: float32, float64, float16, bfloat16, int32 or int64, of any shape and device; same dtypes and sizes on all members.
                float16 and bfloat16 are reduced in float32, and the result is rounded once.
            op: SUM, AVG (over the members that contributed to that tensor), MIN, MAX or PRODUCT.
            receive: tensors for the results, with the dtypes, shapes and devices of `tensors`, which do not change then. A tensor
                whose entry in `contributors` is 0 is not written.
            quantization: format of the transfers of floating tensors, equal on all members. None sends their dtype, "bfloat16" rounds
                them to bfloat16, "min_max" and "zero_point_scale" send one byte per element. The error is bounded; see below.
            max_in_flight: number of all-reduces that run at once; small tensors share one, unless they are quantized to uint8.
            timeout_s: seconds for the whole call; None waits without limit for a member that is alive but does not make the call.
        Raises:
            ElasticError: this process is no longer a member. The tensors hold their original values.
            DesyncError: the members passed different tensors, operations or quantizations. All members raise it.
            TypeError, ValueError: invalid arguments; nothing was sent.

        **Error of quantized results.** Let R be the range of a member's tensor: maximum minus minimum, and for zero_point_scale 0 counts
        as an element. A result differs from the exact one by at most the following, plus the rounding of the result to its dtype and that
        of sums in float32 (float64 for float64). The members are the contributors, and x is a member's element.

            min_max, zero_point_scale    SUM: sum of R / 254, AVG: mean of R / 254, MIN and MAX: maximum of R / 254
            bfloat16                     SUM: sum of |x| / 127, AVG: mean of |x| / 127, MIN and MAX: maximum of |x| / 127

        PRODUCT has no bound in one byte, which is refused; with bfloat16 and n members, its factor is at most (1 + 1 / 256) ** (n + 1).
        With min_max, tensors of equal elements have no such error. With zero_point_scale, an element that is 0 on all members stays 0.
        In one byte, a NaN, an infinity or a sum that overflows turns up to 2048 elements around it into NaN on all members. bfloat16
        transfers NaN and infinity, and numbers above 3.39e38 become infinite.
        """
        if max_in_flight < 1:
            raise ValueError(f"all_reduce: max_in_flight must be at least 1, got {max_in_flight}")
        call = AllReduceCall(tensors, op, receive, quantization, self._memory)
        async with self._call("all_reduce", timeout_s):
            round_ = Round(self._state.committed, len(call.buckets), call.signature)

            async def run(view_number: int) -> None:
                with self._agent.world_of(view_number) as world:
                    assert world is not None  # a member that is alone runs nothing
                    await call.run(world, round_, max_in_flight)

            success = await run_round(self._agent, round_, run)
            contributors: list[int] = []
            for index, bucket in enumerate(call.buckets):
                size = call.contributors[index] if round_.finished[index] else 0
                if size:
                    await call.unpack(index)
                contributors += [size] * len(bucket)
        retries = max(call.runs - 1, 0)
        return AllReduceOutcome(success, call.tx_bytes, call.rx_bytes, retries, self.size, tuple(contributors))

    async def all_reduce_with_retry(
        self,
        tensor: Tensor,
        op: AnyReduceOp = ReduceOp.SUM,
        *,
        receive: Tensor | None = None,
        quantization: Quantization | None = None,
        timeout_s: float | None = None,
    ) -> AllReduceOutcome:
        """`all_reduce_multiple_with_retry` for one tensor."""
        return await self.all_reduce_multiple_with_retry(
            [tensor],
            op,
            receive=None if receive is None else [receive],
            quantization=quantization,
            timeout_s=timeout_s,
        )

    # -- building blocks -----------------------------------------------------------------------------------------------

    def all_reduce_async(
        self,
        tensor: Tensor,
        op: AnyReduceOp = ReduceOp.SUM,
        *,
        tag: int = 0,
        receive: Tensor | None = None,
        quantization: Quantization | None = None,
    ) -> AllReduceHandle:
        """Start an all-reduce in this view, in place or into another tensor, and return at once.

        The tensor is written when the result is complete on this member. It may not be complete on the others, and some of them may be
        lost: `agree` tells. In a world of one member, the tensor stays as it is.

        Args:
            tensor, receive, quantization: as for `all_reduce_multiple_with_retry`. `tensor` must not change until it is done.
            tag: identifies the all-reduce: below 2**28, unique among those in flight, and the same on all members.
        Raises:
            BrokenWorldException: this view has ended. Await `next_view`.
            ElasticError: this process is no longer a member.
            TypeError, ValueError: invalid arguments, for example a tag that is in use; nothing was sent.
        """
        if not 0 <= tag < TAG_LIMIT:
            raise ValueError(f"all_reduce_async: a tag must be from 0 to {TAG_LIMIT - 1}, got {tag}")
        if (running := (self.view_number, tag)) in self._async_tags:
            raise ValueError(
                f"all_reduce_async: an all-reduce with tag {tag} is in flight; await it or choose another tag"
            )
        call = AllReduceCall([tensor], op, None if receive is None else [receive], quantization, {})
        view_number = self.view_number
        with self._agent.world_of(view_number):
            self._async_tags.add(running)

        async def reduce() -> None:
            try:
                with self._agent.world_of(view_number) as world:
                    if world is not None:
                        await call.reduce(world, 0, tag)
                        await call.unpack(0)
            finally:
                self._async_tags.discard(running)

        return AllReduceHandle(reduce(), view_number, self.size)

    async def agree(self, finished: Sequence[bool]) -> list[bool]:
        """Return, for each operation, whether it finished on all members. If all did, the round is committed: the originals may be freed.

        Call it in each view before and after the operations run. The rules are in multiworld/elastic/protocol/rounds.py.

        Args:
            finished: for each operation, whether it finished on this member.
        Raises:
            BrokenWorldException: this view has ended. Await `next_view` and call it again with the same flags.
            ElasticError: this process is no longer a member.
            ValueError: the number of flags differs from that of the open round.
        """
        async with self._call("agree", timeout_s=None):
            if self._round is None:
                self._round = Round(self._state.committed, len(finished), f"agree on {len(finished)}")
            round_ = self._round
            if len(finished) != len(round_.finished):
                raise ValueError(f"agree: {len(finished)} flags, the round has {len(round_.finished)}")
            round_.finished = list(finished)
            if await agree(self._agent, round_, self.view_number):
                self._round = None
            return list(round_.finished)

    @contextlib.asynccontextmanager
    async def _call(self, what: str, timeout_s: float | None) -> AsyncIterator[None]:
        """Serialise the calls. After a timeout, a cancellation or an unexpected error this member leaves, because it is out of step."""
        async with self._call_lock:
            self._agent.raise_if_ended()
            try:
                async with asyncio.timeout(timeout_s):
                    yield
            except TimeoutError:
                self._agent.leave(ViewChangeError, f"{what} took over {timeout_s:g} s")
                self._agent.raise_if_ended()
            except MismatchError as mismatch:
                self._agent.leave(DesyncError, f"rank {mismatch.rank}: {mismatch.detail}")
                self._agent.raise_if_ended()
            except BaseException as error:
                if not isinstance(error, WorldError | ValueError):
                    self._agent.leave(ElasticError, f"{what} ended with {type(error).__name__}")
                raise
