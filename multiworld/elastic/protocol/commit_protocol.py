"""The steps of a call: exchange flags, run the unfinished operations, exchange again, until the round is committed.

No clock and no I/O: the steps that need them are methods of `Member`. The simulation runs the same functions with a member of its own.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from multiworld.elastic.protocol.member_state import Action, MemberState
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

    def perform(self, actions: Sequence[Action]) -> None:
        """Perform the actions of `state`, in order."""

    def view_ended(self, view_number: int) -> BrokenWorldException:
        """Return the error of an operation whose view has ended."""
        ...


RunOperations = Callable[[int], Awaitable[None]]
"""Runs the unfinished operations of a round in one view, which the number names. Marks each operation that succeeds.

Returns when no operation is in flight.

Raises BrokenWorldException when the view has ended.
"""


async def agree(member: Member, round_: Round, view_number: int) -> bool:
    """Mark the operations as finished that finished on all members of that view. Returns whether the round is committed.

    Raises BrokenWorldException, MismatchError.
    """
    if round_.is_committed(member.state.committed):
        return True
    await _exchange_flags(member, round_, view_number)
    if round_.complete:
        _commit(member, view_number)
    return round_.complete


async def run_round(member: Member, round_: Round, run: RunOperations) -> bool:
    """Run a round to its end, over as many views as necessary. Returns False if it is unfinished and no other member is left.

    Raises MismatchError.
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
    """Wait at a boundary between two calls for all other members. If new members wait, the next view includes them.

    A boundary is a round. Its only flag is set if the member does not know of a new member that waits. All members that complete the
    exchange of flags have the same result, so they all stay in this view or all ask for the next one.
    Raises MismatchError.
    """
    state = member.state
    boundary = Round(state.committed, 1, "update_membership")
    view_number = await member.next_view(0)
    while state.committed == boundary.number:
        boundary.finished = [not state.new_members_wait]
        try:
            await _exchange_flags(member, boundary, view_number)
            _commit(member, view_number)
        except BrokenWorldException:
            view_number = await member.next_view(view_number)
        else:
            if not boundary.complete:
                member.perform(state.request_admission())
                await member.next_view(view_number)


async def _exchange_flags(member: Member, round_: Round, view_number: int) -> None:
    """Set the flags of a round that all members of that view have set, and no others. Raises BrokenWorldException, MismatchError."""
    if not round_.flags_agree(await member.all_gather(view_number, round_.summary())):
        round_.intersect(await member.all_gather(view_number, round_.flags()))


def _commit(member: Member, view_number: int) -> None:
    """Commit a round. Raises BrokenWorldException if this member has asked for the next view without reporting the round as committed."""
    if not member.state.commit_round(view_number):
        raise member.view_ended(view_number)
