"""The course of a call: exchange flags, run what is unfinished, exchange again, until the round is closed. Pure.

Generators that yield what is to be done and are sent what came of it; `EpochOver` is thrown into them when the epoch ended meanwhile. The
shell (multiworld/elastic/elastic_world.py) and the simulation drive the same ones.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from multiworld.elastic.rounds import Round
from multiworld.elastic.seat import Seat


class EpochOver(Exception):  # noqa: N818 - it is thrown into a call, not at people
    """What was to be done in that epoch could not be."""


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until there is a later epoch than `after`; gives it."""

    after: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Say this to all members of that epoch; gives what all say, by rank."""

    epoch: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Run:
    """Run the round's unfinished operations in that epoch, and mark those that finish. Ends when nothing is under way any more.

    Attributes:
        again: they ran before, in an epoch that broke.
    """

    epoch: int
    again: bool


Step = Await | Exchange | Run
Course = Generator[Step, Any, bool]


def agree(seat: Seat, round_: Round, epoch: int) -> Course:
    """Take as finished what is finished at all members of that epoch; gives whether the round is closed.

    Raises EpochOver, RoundMismatch.
    """
    if round_.is_closed(seat.closed):
        return True
    if round_.judge((yield Exchange(epoch, round_.head()))) == "compare":
        round_.settle((yield Exchange(epoch, round_.flags())))
    if not round_.complete:
        return False
    if not seat.close_round(epoch):  # we have asked for the next epoch, and have not said that it is closed
        raise EpochOver
    return True


def conduct(seat: Seat, round_: Round) -> Course:
    """Bring a round to its end, through as many epochs as it takes; gives whether all is finished, or nobody else is left.

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
