"""The steps of a call: exchange flags, run the unfinished operations, exchange again, until the round is committed. Pure.

The generators yield steps and receive the results. The caller throws `ViewEnded` into them when the view has ended.
multiworld/elastic/world.py and the simulation drive the same generators.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from multiworld.elastic.protocol.member_state import MemberState
from multiworld.elastic.protocol.rounds import Round


class ViewEnded(Exception):  # noqa: N818 - control flow, not an error for the caller
    """The step could not be completed because its view has ended."""


@dataclass(frozen=True, slots=True)
class AwaitView:
    """Wait until a view later than `after` is ready. The result is its number."""

    after: int


@dataclass(frozen=True, slots=True)
class AllGather:
    """All-gather `data` in that view. The result is the data of all members, ordered by rank."""

    view_number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class RunOperations:
    """Run the unfinished operations of the round in that view and mark those that finish. It ends when no operation is in flight.

    Attributes:
        retry: they ran before, in a view that broke.
    """

    view_number: int
    retry: bool


@dataclass(frozen=True, slots=True)
class AwaitBoundary:
    """Report to the rendezvous server that this member is at a boundary of that view. It ends when all members are."""

    view_number: int


Step = AwaitView | AllGather | RunOperations | AwaitBoundary
Steps = Generator[Step, Any, bool]


def agree(state: MemberState, round_: Round, view_number: int) -> Steps:
    """Mark the operations as finished that finished on all members of that view. Returns whether the round is committed.

    Raises ViewEnded, RoundMismatch.
    """
    if round_.is_committed(state.committed):
        return True
    if not round_.flags_agree((yield AllGather(view_number, round_.summary()))):
        round_.intersect((yield AllGather(view_number, round_.flags())))
    if not round_.complete:
        return False
    if not state.commit_round(
        view_number
    ):  # this member has asked for the next view without reporting the round as committed
        raise ViewEnded
    return True


def run_round(state: MemberState, round_: Round) -> Steps:
    """Run a round to its end, over as many views as necessary. Returns False if it is unfinished and no other member is left.

    Raises RoundMismatch.
    """
    view_number, retry = (yield AwaitView(0)), False
    while True:
        try:
            if (yield from agree(state, round_, view_number)):
                return True
            if len(state.view.members) == 1 and state.commit_round(view_number):
                return False
            yield RunOperations(view_number, retry)
        except ViewEnded:
            view_number, retry = (yield AwaitView(view_number)), True


def pass_boundary(state: MemberState) -> Steps:
    """Wait at a boundary between two rounds for all other members, so that waiting new members can be admitted.

    The members first exchange which call they are in, because a member that runs a round would never reach the boundary.
    Raises RoundMismatch.
    """
    view_number, before = (yield AwaitView(0)), state.boundaries
    while True:
        try:
            boundary = Round(state.committed, 0, "update_membership")
            boundary.flags_agree((yield AllGather(view_number, boundary.summary())))
            yield AwaitBoundary(view_number)
            return True
        except ViewEnded:
            view_number = yield AwaitView(view_number)
            if state.boundaries > before:
                return True
