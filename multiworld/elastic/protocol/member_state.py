"""The state of one member of an elastic world. Pure: events in, actions out; multiworld/elastic/agent.py performs the actions.

    waiting ──▶ forming ──▶ ready ◀──▶ requested      waiting: a new member that no view includes yet
                   ▲  └──────────────────▲ │          requested: waits for the decision of the rendezvous server about the next view
                   └───────────────────────┘          ended: no longer a member; reached from every phase

The world of a view is formed once: it forms or fails to form, and it never continues after it broke. Older views are ignored, so delayed
messages have no effect, even after this process was frozen.
"""

from dataclasses import dataclass
from typing import Literal

from multiworld.elastic.protocol import messages
from multiworld.errors import ElasticError, EvictedError, RendezvousError
from multiworld.texts import one_line

Phase = Literal["waiting", "forming", "ready", "requested", "ended"]


@dataclass(frozen=True, slots=True)
class Send:
    """Send the message to the rendezvous server."""

    message: messages.Message


@dataclass(frozen=True, slots=True)
class CloseView:
    """Close the world of the view, whether it is forming, working or broken."""


@dataclass(frozen=True, slots=True)
class FormView:
    """Form the world of this view, then report `on_formed` or `on_failed`."""

    view: messages.View


@dataclass(frozen=True, slots=True)
class EndMembership:
    """This process is no longer a member. Close the link to the rendezvous server. Calls raise `error` with `detail`."""

    error: type[ElasticError]
    detail: str


Action = Send | CloseView | FormView | EndMembership


class MemberState:
    """Holds the state of one member.

    Attributes:
        view: the view that is ready, forming, or has ended.
        committed: number of rounds known to be committed.
        new_members_wait: whether the rendezvous server has said so since the current view began.
        rendezvous_error: why the rendezvous server cannot be reached; None while it can.
    """

    def __init__(self, member_id: str) -> None:
        self.id = member_id
        self.phase: Phase = "waiting"
        self.view = messages.View(0, ())
        self.committed = 0
        self.new_members_wait = False
        self._request: messages.NextViewRequest | None = None
        self.rendezvous_error: str | None = None

    def is_in(self, view_number: int) -> bool:
        """Return whether that view is the current one and operations may run in it."""
        return self.view.number == view_number and self.phase == "ready"

    # -- from the rendezvous server ------------------------------------------------------------------------------------

    def on_message(self, message: messages.Message) -> list[Action]:
        """The rendezvous server sent a message."""
        current = self.view.number
        match message:
            case _ if self.phase == "ended":
                return []
            case messages.View(number=number) if number > current:
                return self._install_view(message)
            case messages.ViewInvalidated(number) if number == current:
                return self._end_view() if self.is_in(number) or self.phase == "forming" else []
            case messages.NewMembersWait():
                self.new_members_wait = True
            case messages.Evicted(reason=reason):
                detail = f"the rendezvous server evicted this member after view {current}: {one_line(reason)}"
                return self.leave(EvictedError, detail)
        return []

    def on_reconnected(self) -> list[Action]:
        """The connection to the restarted rendezvous server works again. Repeats the request that may have been lost."""
        return [Send(self._request)] if self._request is not None and self.phase == "requested" else []

    def on_rendezvous_lost(self, detail: str) -> list[Action]:
        """The rendezvous server cannot be reached or does not know this member. The current view may continue, but no other follows."""
        self.rendezvous_error = detail
        self.new_members_wait = False
        return [] if self.is_in(self.view.number) else self.leave(RendezvousError, detail)

    # -- from the world of the view ------------------------------------------------------------------------------------

    def on_formed(self, view_number: int) -> None:
        """The world of that view formed."""
        if self.phase == "forming" and view_number == self.view.number:
            self.phase = "ready"

    def on_failed(self, view_number: int, suspect: str = "") -> list[Action]:
        """The world of that view broke or did not form. `suspect` is the id of the member that caused it, or ""."""
        if view_number != self.view.number or not (self.phase == "forming" or self.is_in(view_number)):
            return []
        return self._end_view(suspect)

    # -- from the application ------------------------------------------------------------------------------------------

    def request_admission(self) -> list[Action]:
        """All members have committed the boundary of this view, and new members wait. The next view includes them."""
        return self._request_next_view(at_boundary=True)

    def commit_round(self, view_number: int) -> bool:
        """Count a round that was committed in that view. Returns False if the view has ended: its request does not report the round."""
        if not self.is_in(view_number):
            return False
        self.committed += 1
        return True

    def leave(self, error: type[ElasticError], detail: str) -> list[Action]:
        """End the membership. Idempotent."""
        if self.phase == "ended":
            return []
        self.phase = "ended"
        return [*([CloseView()] if self.view.number else []), EndMembership(error, detail)]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _install_view(self, view: messages.View) -> list[Action]:
        if self.id not in view.ids():  # a protocol error: the rendezvous server sends a view only to its members
            return self.leave(EvictedError, f"view {view.number} does not include this member")
        before, self.view, self.phase, self._request = self.view.number, view, "forming", None
        self.committed = max(self.committed, view.committed)
        self.new_members_wait = False
        return [*([CloseView()] if before else []), FormView(view)]

    def _end_view(self, suspect: str = "") -> list[Action]:
        return [CloseView(), *self._request_next_view(at_boundary=False, suspect=suspect)]

    def _request_next_view(self, *, at_boundary: bool, suspect: str = "") -> list[Action]:
        if self.rendezvous_error is not None:
            return self.leave(RendezvousError, self.rendezvous_error)
        self._request = messages.NextViewRequest(self.view.number, at_boundary, self.committed, suspect)
        self.phase = "requested"
        return [Send(self._request)]
