"""Versions of the model: how many there are in service, which link serves which, and when an old one is no longer in use.

To the scheduler, a link and a version together are one link: it knows a worker that serves two versions under two ids. Here these are
called *duties* of the link: "s0.r0#1@2" is the duty of the link s0.r0#1 for version number 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from server.link import Link
from server.plan import StagePlan
from server.predictor import ModelVersion
from server.scheduling.events import Event, LinkBroken, LinkDraining, LinkReady
from server.slots import Slot


@dataclass(frozen=True)
class VersionPlan:
    """One version, ready to be sent to workers."""

    version: ModelVersion
    stages: tuple[StagePlan, ...]

    @classmethod
    def of(cls, stages: tuple[StagePlan, ...]) -> VersionPlan:
        """The version that these stages, all of them, belong to."""
        return cls(ModelVersion(stages[0].number, stages[0].spec.version), stages)

    @property
    def weights_bytes(self) -> int:
        return sum(len(plan.weights) for plan in self.stages)

    def for_slot(self, slot: Slot) -> tuple[StagePlan, ...]:
        """What a worker in that slot is to hold: its stage, or for a spare all of them."""
        return self.stages if slot.stage is None else (self.stages[slot.stage],)


def duty_id(link: Link, number: int) -> str:
    """What the scheduler calls the duty of this link for this version."""
    return f"{link.id}@{number}"


def link_id(duty: str) -> str:
    """The link whose duty it is."""
    return duty.partition("@")[0]


class Versions:
    """The version that serves, and the one before it for as long as requests that began with it are under way."""

    def __init__(self, first: VersionPlan) -> None:
        self.current = first
        self.retiring: VersionPlan | None = None
        self._numbers = {first.version.name: first.version.number}

    def number_of(self, name: str) -> int:
        """The number of a version, known or new."""
        return self._numbers.setdefault(name, len(self._numbers) + 1)

    def number_served(self, name: str) -> int:
        """The number of a version that was in service."""
        return self._numbers[name]

    def move_to(self, plan: VersionPlan) -> None:
        """New requests go to `plan` from now on."""
        assert self.retiring is None, "the version before the last is in use still"
        self.retiring, self.current = self.current, plan

    def take_up(self, link: Link) -> Iterator[Event]:
        """The link serves: tell the scheduler of every version in service that it holds and did not serve yet."""
        for plan in (self.current, *([self.retiring] if self.retiring else [])):
            number, name = plan.version
            if number in link.holds and number not in link.duties:
                link.duties.add(number)
                yield LinkReady(duty_id(link, number), link.stage, name)

    @staticmethod
    def duties_of(link: Link) -> list[str]:
        """Their ids."""
        return [duty_id(link, number) for number in sorted(link.duties)]

    @staticmethod
    def lay_down(link: Link, number: int) -> Iterator[Event]:
        """The link is to take no new batches of this version."""
        if number in link.duties:
            yield LinkDraining(duty_id(link, number))

    @staticmethod
    def leave(link: Link) -> Iterator[Event]:
        """The link is to take no new batches at all."""
        return (LinkDraining(duty) for duty in Versions.duties_of(link))

    @staticmethod
    def lose(link: Link) -> Iterator[Event]:
        """The link has ended."""
        return (LinkBroken(duty, link.cause or "") for duty in Versions.duties_of(link))
