"""The steps of a call: exchange flags, run the unfinished operations, exchange again, until the round is closed. Pure.

The generators yield steps and receive the results. The caller throws `EpochOver` into them when the epoch has ended.
multiworld/elastic/world.py and the simulation drive the same generators.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from multiworld.elastic.protocol.member_state import MemberState
from multiworld.elastic.protocol.rounds import Round


class EpochOver(Exception):  # noqa: N818 - control flow, not an error for the caller
    """The step could not be completed because its epoch is over."""


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until an epoch later than `after` is ready. The result is its number."""

    after: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """All-gather `data` in that epoch. The result is the data of all members, ordered by rank."""

    epoch: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Run:
    """Run the unfinished operations of the round in that epoch and mark those that finish. It ends when no operation is in flight.

    Attributes:
        again: they ran before, in an epoch that broke.
    """

    epoch: int
    again: bool


@dataclass(frozen=True, slots=True)
class Stand:
    """Tell the rendezvous that this member is at a boundary of that epoch. It ends when all members are."""

    epoch: int


Step = Await | Exchange | Run | Stand
Course = Generator[Step, Any, bool]


def agree(seat: MemberState, round_: Round, epoch: int) -> Course:
    """Mark the operations as finished that finished on all members of that epoch. Returns whether the round is closed.

    Raises EpochOver, RoundMismatch.
    """
    if round_.is_closed(seat.closed):
        return True
    if round_.judge((yield Exchange(epoch, round_.head()))) == "compare":
        round_.settle((yield Exchange(epoch, round_.flags())))
    if not round_.complete:
        return False
    if not seat.close_round(epoch):  # this member has asked for the next epoch and did not report the round as closed
        raise EpochOver
    return True


def conduct(seat: MemberState, round_: Round) -> Course:
    """Run a round to its end, over as many epochs as necessary. Returns False if it is unfinished and no other member is left.

    Raises RoundMismatch.
    """
    epoch, again = (yield Await(0)), False
    while True:
        try:
            if (yield from agree(seat, round_, epoch)):
                return True
            if len(seat.view.members) == 1 and seat.close_round(epoch):
                return False
            yield Run(epoch, again)
        except EpochOver:
            epoch, again = (yield Await(epoch)), True


def pass_boundary(seat: MemberState) -> Course:
    """Wait at a boundary between two rounds for all other members, so that waiting newcomers can be admitted.

    The members first exchange the call that they are in, because a member that runs a round would never reach the boundary.
    Raises RoundMismatch.
    """
    epoch, before = (yield Await(0)), seat.boundaries
    while True:
        try:
            here = Round(seat.closed, 0, "update_membership")
            here.judge((yield Exchange(epoch, here.head())))
            yield Stand(epoch)
            return True
        except EpochOver:
            epoch = yield Await(epoch)
            if seat.boundaries > before:
                return True
