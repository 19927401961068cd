"""A member's place in an elastic world. Pure: events in, actions out; the shell (multiworld/elastic/keeper.py) performs them.

    waiting ──▶ forming ──▶ ready ◀──▶ asked          waiting: a newcomer that no epoch has yet
                   ▲  └──────────────────▲ │          asked: what comes after this epoch is for the rendezvous to say
                   └───────────────────────┘          out: we are no member any more, from whatever state

An epoch is one attempt: it forms or does not, breaks, and never comes back. A view of an older epoch than ours is ignored, so a
message from the past, or a past from which this process wakes, changes nothing.
"""

from dataclasses import dataclass
from typing import Literal

from multiworld.elastic.messages import Ask, Evicted, Leave, Message, Unchanged, View, Void

State = Literal["waiting", "forming", "ready", "asked", "out"]
End = Literal["left", "evicted", "rendezvous", "reform", "desync"]
"""Why we are no member any more: we left, were taken out, have no rendezvous, no epoch formed in time, the members disagree."""


@dataclass(frozen=True, slots=True)
class Send:
    message: Message


@dataclass(frozen=True, slots=True)
class CloseEpoch:
    """Give up the world of that epoch, whether it is forming, alive or broken."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Form:
    """Form the world of this view; answer with `formed` or `failed`."""

    view: View


@dataclass(frozen=True, slots=True)
class Ready:
    """Operations may run in this epoch."""

    view: View


@dataclass(frozen=True, slots=True)
class BoundaryPassed:
    """Who stood at the boundary may go on."""


@dataclass(frozen=True, slots=True)
class BoundaryFailed:
    """Who stood at the boundary cannot be told who waits; the epoch goes on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """It is over for us."""

    end: End
    reason: str


Action = Send | CloseEpoch | Form | Ready | BoundaryPassed | BoundaryFailed | Fail


class Seat:
    """
    Attributes:
        view: the epoch that we are in, form, or have given up.
        closed: how many rounds we know to be closed.
        boundaries: how many boundaries we know to be passed.
    """

    def __init__(self, member_id: str) -> None:
        self.id = member_id
        self.state: State = "waiting"
        self.view = View(0, ())
        self.closed = 0
        self.boundaries = 0
        self._asked: Ask | None = None
        self._at_boundary = False
        self._passed = False
        self._severed: str | None = None  # why the rendezvous cannot be reached any more

    @property
    def epoch(self) -> int:
        return self.view.epoch

    def is_in(self, epoch: int) -> bool:
        """Whether that epoch is ours, and still holds."""
        return self.epoch == epoch and (
            self.state == "ready" or (self.state == "asked" and self._asked is not None and self._asked.boundary)
        )

    # -- from the rendezvous -------------------------------------------------------------------------------------------------

    def heard(self, message: Message) -> list[Action]:
        match message:
            case _ if self.state == "out":
                return []
            case View(epoch=epoch) if epoch > self.epoch:
                return self._enter(message)
            case Void(epoch=epoch) if epoch == self.epoch:
                return self._ask(boundary=False) if self.is_in(epoch) or self.state == "forming" else []
            case Unchanged(epoch, boundaries) if epoch == self.epoch and boundaries > self.boundaries:
                self._pass(boundaries)
                if self.state == "asked" and self.is_in(epoch):
                    self.state, self._asked = "ready", None
                return self._tell_passed() if self.state == "ready" else []
            case Evicted(reason=reason):
                return self._end("evicted", f"the rendezvous took us out after epoch {self.epoch}: {reason}")
        return []

    def reconnected(self) -> list[Action]:
        """The rendezvous was restarted and knows us: say again what may have been lost."""
        return [Send(self._asked)] if self._asked is not None and self.state == "asked" else []

    def severed(self, reason: str) -> list[Action]:
        """The rendezvous is gone for good, or does not know us any more. The epoch that we are in may go on, but no other follows."""
        self._severed = reason
        if not self.is_in(self.epoch):
            return self._end("rendezvous", reason)
        return self._turn_back(reason) if self._at_boundary else []

    # -- from the epoch's world ------------------------------------------------------------------------------------------------

    def formed(self, epoch: int) -> list[Action]:
        if self.state != "forming" or epoch != self.epoch:
            return []
        self.state = "ready"
        actions: list[Action] = [Ready(self.view), *self._tell_passed()]
        return actions + (self.stand_at_boundary() if self._at_boundary else [])

    def failed(self, epoch: int, accused: str = "") -> list[Action]:
        """The world of that epoch broke, or did not form."""
        if epoch != self.epoch or not (self.state == "forming" or self.is_in(epoch)):
            return []
        return self._ask(boundary=False, accused=accused)

    # -- from the application ----------------------------------------------------------------------------------------------------

    def stand_at_boundary(self) -> list[Action]:
        """Between two operations: whoever waits may be let in now."""
        if self.state == "out":
            return []
        self._at_boundary = True
        if self.state != "ready":
            return []
        return self._ask(boundary=True) if self._severed is None else self._turn_back(self._severed)

    def close_round(self, epoch: int) -> bool:
        """A round was closed in that epoch. False when we have given the epoch up: then nobody has been told that it is."""
        if self.state != "ready" or epoch != self.epoch:
            return False
        self.closed += 1
        return True

    def give_up(self, end: End, reason: str) -> list[Action]:
        """Be no member any more, for a reason of our own. Idempotent."""
        return [Send(Leave()), *ending] if (ending := self._end(end, reason)) else []

    # -- inside ----------------------------------------------------------------------------------------------------------------------

    def _enter(self, view: View) -> list[Action]:
        if self.id not in view.ids():  # cannot be, unless the rendezvous takes us for somebody else
            return self._end("evicted", f"epoch {view.epoch} was made without us")
        before, self.view, self.state, self._asked = self.epoch, view, "forming", None
        self.closed = max(self.closed, view.closed)
        if view.boundaries > self.boundaries:
            self._pass(view.boundaries)
        return [*([CloseEpoch(before)] if before else []), Form(view)]

    def _ask(self, *, boundary: bool, accused: str = "") -> list[Action]:
        if self._severed is not None:
            return self._end("rendezvous", self._severed)
        self._asked = Ask(self.epoch, boundary, self.closed, self.boundaries, accused)
        self.state = "asked"
        return [*([] if boundary else [CloseEpoch(self.epoch)]), Send(self._asked)]

    def _pass(self, boundaries: int) -> None:
        """The boundary is behind us, though nobody is told before an epoch is ready."""
        self.boundaries, self._at_boundary, self._passed = boundaries, False, True

    def _tell_passed(self) -> list[Action]:
        passed, self._passed = self._passed, False
        return [BoundaryPassed()] if passed else []

    def _turn_back(self, reason: str) -> list[Action]:
        self.state, self._asked, self._at_boundary = "ready", None, False
        return [BoundaryFailed(reason)]

    def _end(self, end: End, reason: str) -> list[Action]:
        if self.state == "out":
            return []
        self.state = "out"
        return [*([CloseEpoch(self.epoch)] if self.epoch else []), Fail(end, reason)]
