"""The steps of a call: exchange flags, run the unfinished operations, exchange again, until the round is committed.

No clock and no I/O: the steps that need them are methods of `Member`. The simulation runs the same functions with a member of its own.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

from multiworld.elastic.protocol.member_state import MemberState
from multiworld.elastic.protocol.rounds import Round
from multiworld.errors import BrokenWorldException


class Member(Protocol):
    """One member. All methods raise ElasticError when this process is no longer a member."""

    state: MemberState

    async def next_view(self, after: int) -> int:
        """Wait until a view later than `after` is ready. Returns its number."""
        ...

    async def all_gather(self, view_number: int, data: bytes) -> list[bytes]:
        """Return `data` of all members of that view, ordered by rank. Raises BrokenWorldException when the view has ended."""
        ...

    async def wait_at_boundary(self, view_number: int) -> None:
        """Wait until all members of that view are at the boundary. Raises BrokenWorldException when the view has ended."""

    def view_ended(self, view_number: int) -> BrokenWorldException:
        """Return the error of an operation whose view has ended."""
        ...


RunOperations = Callable[[int], Awaitable[None]]
"""Runs the unfinished operations of a round in the view with this number, and marks those that succeed. Returns when none is in flight.

Raises BrokenWorldException when the view has ended.
"""


async def agree(member: Member, round_: Round, view_number: int) -> bool:
    """Mark the operations as finished that finished on all members of that view. Returns whether the round is committed.

    Raises BrokenWorldException, RoundMismatch.
    """
    if round_.is_committed(member.state.committed):
        return True
    if not round_.flags_agree(await member.all_gather(view_number, round_.summary())):
        round_.intersect(await member.all_gather(view_number, round_.flags()))
    if not round_.complete:
        return False
    if not member.state.commit_round(view_number):
        # This member has asked for the next view without reporting the round as committed.
        raise member.view_ended(view_number)
    return True


async def run_round(member: Member, round_: Round, run: RunOperations) -> bool:
    """Run a round to its end, over as many views as necessary. Returns False if it is unfinished and no other member is left.

    Raises RoundMismatch.
    """
    view_number = await member.next_view(0)
    while True:
        try:
            if await agree(member, round_, view_number):
                return True
            if len(member.state.view.members) == 1 and member.state.commit_round(view_number):
                return False
            await run(view_number)
        except BrokenWorldException:
            view_number = await member.next_view(view_number)


async def pass_boundary(member: Member) -> None:
    """Wait at a boundary between two rounds for all other members, so that waiting new members can be admitted.

    The members first exchange which call they are in, because a member that runs a round would never reach the boundary.
    Raises RoundMismatch.
    """
    state = member.state
    view_number, before = await member.next_view(0), state.boundaries
    while state.boundaries == before:
        try:
            boundary = Round(state.committed, 0, "update_membership")
            boundary.flags_agree(await member.all_gather(view_number, boundary.summary()))
            await member.wait_at_boundary(view_number)
        except BrokenWorldException:
            view_number = await member.next_view(view_number)
