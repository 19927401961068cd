"""The state of one member of an elastic world. Pure: events in, actions out; multiworld/elastic/agent.py performs the actions.

    waiting ──▶ forming ──▶ ready ◀──▶ asked          waiting: a newcomer that no epoch includes yet
                   ▲  └──────────────────▲ │          asked: waits for the decision of the rendezvous about the next epoch
                   └───────────────────────┘          out: no longer a member; reached from every state

An epoch is one attempt: it forms or fails to form, and it never continues after it broke. Views of older epochs are ignored, so delayed
messages have no effect, even after this process was frozen.
"""

from dataclasses import dataclass
from typing import Literal

from multiworld.elastic.protocol.messages import Ask, Evicted, Leave, Message, Unchanged, View, Void

State = Literal["waiting", "forming", "ready", "asked", "out"]
End = Literal["left", "evicted", "rendezvous", "reform", "desync"]
"""Why this process is no longer a member: it left, was evicted, has no rendezvous, no epoch formed in time, or the calls differ."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send the message to the rendezvous."""

    message: Message


@dataclass(frozen=True, slots=True)
class CloseEpoch:
    """Close the world of that epoch, whether it is forming, working or broken."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Form:
    """Form the world of this view, then report `formed` or `failed`."""

    view: View


@dataclass(frozen=True, slots=True)
class Ready:
    """Operations may run in this epoch."""

    view: View


@dataclass(frozen=True, slots=True)
class BoundaryPassed:
    """The call that waits at the boundary succeeds."""


@dataclass(frozen=True, slots=True)
class BoundaryFailed:
    """The call that waits at the boundary fails because the rendezvous cannot be reached. The epoch continues."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """This process is no longer a member."""

    end: End
    reason: str


Action = Send | CloseEpoch | Form | Ready | BoundaryPassed | BoundaryFailed | Fail


class MemberState:
    """The state of one member.

    Attributes:
        view: the epoch that is ready, forming, or given up.
        closed: number of rounds known to be closed.
        boundaries: number of boundaries known to be passed.
    """

    def __init__(self, member_id: str) -> None:
        self.id = member_id
        self.state: State = "waiting"
        self.view = View(0, ())
        self.closed = 0
        self.boundaries = 0
        self._asked: Ask | None = None
        self._severed: str | None = None  # why the rendezvous cannot be reached; None while it can

    @property
    def epoch(self) -> int:
        return self.view.epoch

    def is_in(self, epoch: int) -> bool:
        """Return whether that epoch is the current one and operations may run in it."""
        return self.epoch == epoch and (self.state == "ready" or self._at_boundary)

    # -- from the rendezvous -------------------------------------------------------------------------------------------------

    def heard(self, message: Message) -> list[Action]:
        """The rendezvous sent a message."""
        match message:
            case _ if self.state == "out":
                return []
            case View(epoch=epoch) if epoch > self.epoch:
                return self._enter(message)
            case Void(epoch=epoch) if epoch == self.epoch:
                return self._ask(boundary=False) if self.is_in(epoch) or self.state == "forming" else []
            case Unchanged(epoch, boundaries) if epoch == self.epoch and boundaries > self.boundaries:
                self.boundaries = boundaries
                return self._leave_boundary(BoundaryPassed()) if self._at_boundary else []
            case Evicted(reason=reason):
                return self._end("evicted", f"the rendezvous took us out after epoch {self.epoch}: {reason}")
        return []

    def reconnected(self) -> list[Action]:
        """The link to the restarted rendezvous works again. Repeats the request that may have been lost."""
        return [Send(self._asked)] if self._asked is not None and self.state == "asked" else []

    def severed(self, reason: str) -> list[Action]:
        """The rendezvous cannot be reached or does not know this member. The current epoch may continue, but no other follows."""
        self._severed = reason
        if not self.is_in(self.epoch):
            return self._end("rendezvous", reason)
        return self._leave_boundary(BoundaryFailed(reason)) if self._at_boundary else []

    # -- from the epoch's world ------------------------------------------------------------------------------------------------

    def formed(self, epoch: int) -> list[Action]:
        """The world of that epoch formed."""
        if self.state != "forming" or epoch != self.epoch:
            return []
        self.state = "ready"
        return [Ready(self.view)]

    def failed(self, epoch: int, accused: str = "") -> list[Action]:
        """The world of that epoch broke or did not form. `accused` is the id of the member that caused it, or ""."""
        if epoch != self.epoch or not (self.state == "forming" or self.is_in(epoch)):
            return []
        return self._ask(boundary=False, accused=accused)

    # -- from the application ----------------------------------------------------------------------------------------------------

    def stand_at_boundary(self, epoch: int) -> list[Action]:
        """The application is between two operations of that epoch, which must be ready: newcomers may be admitted.

        The outcome is BoundaryPassed or BoundaryFailed, or CloseEpoch when the epoch ends first.
        """
        assert self.state == "ready"
        assert self.epoch == epoch
        return [BoundaryFailed(self._severed)] if self._severed is not None else self._ask(boundary=True)

    def close_round(self, epoch: int) -> bool:
        """Count a round closed in that epoch. Returns False if the epoch is given up: its request does not report the round as closed."""
        if self.state != "ready" or epoch != self.epoch:
            return False
        self.closed += 1
        return True

    def give_up(self, end: End, reason: str) -> list[Action]:
        """End the membership for a local reason. Idempotent."""
        return [Send(Leave()), *ending] if (ending := self._end(end, reason)) else []

    # -- inside ----------------------------------------------------------------------------------------------------------------------

    def _enter(self, view: View) -> list[Action]:
        if self.id not in view.ids():  # a protocol error: the rendezvous sends a view only to its members
            return self._end("evicted", f"epoch {view.epoch} was made without us")
        before, self.view, self.state, self._asked = self.epoch, view, "forming", None
        self.closed = max(self.closed, view.closed)
        self.boundaries = max(self.boundaries, view.boundaries)
        return [*([CloseEpoch(before)] if before else []), Form(view)]

    def _ask(self, *, boundary: bool, accused: str = "") -> list[Action]:
        if self._severed is not None:
            return self._end("rendezvous", self._severed)
        self._asked = Ask(self.epoch, boundary, self.closed, self.boundaries, accused)
        self.state = "asked"
        return [*([] if boundary else [CloseEpoch(self.epoch)]), Send(self._asked)]

    @property
    def _at_boundary(self) -> bool:
        return self.state == "asked" and self._asked is not None and self._asked.boundary

    def _leave_boundary(self, outcome: BoundaryPassed | BoundaryFailed) -> list[Action]:
        self.state, self._asked = "ready", None
        return [outcome]

    def _end(self, end: End, reason: str) -> list[Action]:
        if self.state == "out":
            return []
        self.state = "out"
        return [*([CloseEpoch(self.epoch)] if self.epoch else []), Fail(end, reason)]
