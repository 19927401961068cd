"""`verify_collectives`: members that disagree break their world instead of waiting for each other or computing wrong results."""

from collections.abc import Awaitable, Callable

import pytest
import torch
from torch.distributed import ReduceOp

from multiworld import BrokenWorldException, Cause, World, WorldCommunicator, WorldManager
from tests.integration.crew import Crew

t = torch.zeros
Call = Callable[[WorldCommunicator, str], Awaitable[None]]

DISAGREEMENTS: dict[str, tuple[str, Call, Call]] = {
    "more elements than expected": (
        "all_reduce(float32[5], SUM)",
        lambda c, w: c.all_reduce(t(4), world_name=w),
        lambda c, w: c.all_reduce(t(5), world_name=w),
    ),
    "fewer elements than expected": (
        "broadcast(float32[3], src 0)",
        lambda c, w: c.broadcast(t(4), 0, w),
        lambda c, w: c.broadcast(t(3), 0, w),
    ),
    "another dtype of the same size": (
        "all_gather(int32[4])",
        lambda c, w: c.all_gather([t(4), t(4), t(4)], t(4), w),
        lambda c, w: c.all_gather([t(4).int(), t(4).int(), t(4).int()], t(4).int(), w),
    ),
    "another root": (
        "reduce(float32[4], SUM, dst 2)",
        lambda c, w: c.reduce(t(4), 1, world_name=w),
        lambda c, w: c.reduce(t(4), 2, world_name=w),
    ),
    "another reduction": (
        "all_reduce(float32[4], MAX)",
        lambda c, w: c.all_reduce(t(4), ReduceOp.SUM, w),
        lambda c, w: c.all_reduce(t(4), ReduceOp.MAX, w),
    ),
    "another operation": ("barrier()", lambda c, w: c.all_reduce(t(4), world_name=w), lambda c, w: c.barrier(w)),
    "nothing against something": (
        "scatter(float32[0], src 0)",
        lambda c, w: c.scatter(t(4), [t(4), t(4), t(4)] if c is CREW_FIRST[0] else None, 0, w),
        lambda c, w: c.scatter(t(0), None, 0, w),
    ),
}
CREW_FIRST: list[WorldCommunicator] = []


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_mismatched_collectives_break_the_world_at_all_members(crew: Crew, what: str) -> None:
    words, usual, other = DISAGREEMENTS[what]
    CREW_FIRST[:] = [crew.managers[0].communicator]

    async def part(manager: WorldManager, world: World) -> BrokenWorldException:
        call = other if world.rank == 2 else usual
        with pytest.raises(BrokenWorldException) as caught:
            await call(manager.communicator, world.name)
        return caught.value

    for error in crew.run(3, part, verified=True):
        assert (error.cause, error.rank) == (Cause.ERROR, 2)
        assert words in error.detail


def test_all_to_all_breaks_the_world_when_a_member_sends_too_much(crew: Crew) -> None:
    async def part(manager: WorldManager, world: World) -> Cause:
        inputs = [t(2), t(2), t(2)]
        if world.rank == 1:
            inputs[2] = t(1000)
        with pytest.raises(BrokenWorldException) as caught:
            await manager.communicator.all_to_all([t(2), t(2), t(2)], inputs, world.name)
        return caught.value.cause

    assert crew.run(3, part, verified=True) == [Cause.ERROR] * 3


def test_members_that_start_other_reductions_or_dtypes_break_the_world_when_nothing_is_verified(crew: Crew) -> None:
    async def part(manager: WorldManager, world: World) -> None:
        tensor, op = (t(4).int(), ReduceOp.MAX) if world.rank else (t(4), ReduceOp.SUM)
        with pytest.raises(BrokenWorldException, match=r"all_reduce\((float32, SUM|int32, MAX)\)"):
            await manager.communicator.all_reduce(tensor, op, world.name)

    crew.run(2, part)
