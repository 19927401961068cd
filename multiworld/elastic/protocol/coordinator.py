"""Decides the members of the next view of an elastic world. Pure: events and the time in, actions out, without clock and I/O.

There is one coordinator per world, in the rendezvous server. The world consists of the members that can reach it. So the two sides of a
partition cannot both continue, and any number of members may be lost, rank 0 included, as long as one remains. The rules:

1. A view ends for all members at once. When a member is lost, the others receive `ViewInvalidated` and ask for the next view.
2. The next view is decided when every connected member has asked. A member that does not ask within `regroup_timeout_s` is evicted.
3. New members are admitted only when all members that asked are at a boundary. The members are told that new members wait, and agree
   among themselves at their next boundary to ask for the next view.
4. Two members that repeatedly lose each other while both reach the rendezvous server cannot both stay. After `MAX_FAILED_VIEWS` views in
   which no round was committed, the member is evicted that most others suspect at the end of the last one. Among equals, or if nobody is
   suspected, that is the newest one.
5. View numbers only increase. Messages about another view than the current one are obsolete and ignored.
6. An evicted member cannot come back under its old id.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from multiworld.elastic.protocol.messages import (
    Evicted,
    MemberInfo,
    Message,
    NewMembersWait,
    NextViewRequest,
    View,
    ViewInvalidated,
)

MAX_FAILED_VIEWS = 3
"""Consecutive views without a committed round and without a lost member, after which one member is evicted."""


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send the message to this member."""

    member_id: str
    message: Message


@dataclass(frozen=True, slots=True)
class Persist:
    """Store this view, which is valid from now on, on the disk before any message about it is sent."""

    view: View


Action = SendTo | Persist


class Coordinator:
    """Decides the views of one elastic world.

    Args:
        initial_members: number of members with which the first view starts; also the first view after all members have left.
        regroup_timeout_s: seconds within which a connected member must ask for the next view after its view has ended; also seconds
            within which members must reconnect after a restart of the rendezvous server.
        view: the last stored view after a restart; None at the first start.
        now_s: the current time, on the clock of all `now_s` arguments.
    Attributes:
        view: the current view.
        deadline_s: time of the next call of `on_tick`; None if there is no deadline.
    """

    def __init__(
        self, *, initial_members: int = 1, regroup_timeout_s: float = 10.0, view: View | None = None, now_s: float = 0.0
    ) -> None:
        if initial_members < 1 or regroup_timeout_s <= 0:
            raise ValueError(
                "initial_members must be at least 1 and regroup_timeout_s over 0, "
                f"got {initial_members} and {regroup_timeout_s}"
            )
        self.view = view or View(0, ())
        self._initial_members = initial_members
        self._regroup_timeout_s = regroup_timeout_s
        self._present: set[str] = set()
        self._absent = set(self.view.ids())  # members that may reconnect after a restart of the rendezvous server
        self._waiting: dict[str, MemberInfo] = {}  # new members, in the order in which they connected
        self._requests: dict[str, NextViewRequest] = {}
        self._view_ended = False
        self.deadline_s: float | None = now_s + regroup_timeout_s if self._absent else None
        self._failed_views = 0  # views that ended without a lost member since the last committed round

    @property
    def empty(self) -> bool:
        """Return whether the world has no members, no new members, and no members that may reconnect."""
        return not (self._present or self._absent or self._waiting)

    def may_resume(self, member_id: str) -> bool:
        """Return whether this member of the stored view may reconnect."""
        return member_id in self._absent

    # -- events --------------------------------------------------------------------------------------------------------

    def on_join(self, member: MemberInfo, now_s: float) -> list[Action]:
        """A new member connected, or a member reconnected after a restart of the rendezvous server."""
        actions: list[Action] = []
        if member.id in self._absent:
            self._absent.discard(member.id)
            self._present.add(member.id)
            actions.append(SendTo(member.id, self.view))  # the rendezvous server may have ended before it sent the view
            if self._view_ended:
                actions.append(SendTo(member.id, ViewInvalidated(self.view.number)))
            if self._waiting:
                actions.append(SendTo(member.id, NewMembersWait()))
        else:
            if not self._waiting:
                actions += [SendTo(each.id, NewMembersWait()) for each in self._present_members()]
            self._waiting[member.id] = member
        return actions + self._decide(now_s)

    def on_message(self, member_id: str, message: Message, now_s: float) -> list[Action]:
        """A member sent a message."""
        match message:
            case NextViewRequest(view_number=number) if member_id in self._present and number == self.view.number:
                self._requests[member_id] = message
                self._end_view(now_s)
                return self._decide(now_s)
        return []

    def on_lost(self, member_id: str, now_s: float) -> list[Action]:
        """The connection to a member ended: the member left, or is lost."""
        self._waiting.pop(member_id, None)
        if member_id not in self._present:
            return self._decide(now_s)
        self._remove(member_id)
        self._failed_views = 0
        return [*self._invalidate_view(now_s), *self._decide(now_s)]

    def on_tick(self, now_s: float) -> list[Action]:
        """The time `deadline_s` may have passed."""
        return self._decide(now_s)

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _decide(self, now_s: float) -> list[Action]:
        actions = self._enforce_deadline(now_s)
        if not self._present and not self._absent:
            if len(self._waiting) >= self._initial_members:
                actions += self._install_view(self._waiting.values())
        elif not self._absent and self._requests.keys() >= self._present:
            actions += self._decide_next_view()
        return actions

    def _decide_next_view(self) -> list[Action]:
        """Decide the next view. All connected members have asked for it."""
        present = self._present_members()
        if all(request.at_boundary for request in self._requests.values()):
            return self._install_view([*present, *self._waiting.values()])
        actions: list[Action] = []
        if len(present) == len(self.view.members) and (evicted := self._member_to_evict(present)):
            actions = self._evict(evicted, "repeated connection failures between this member and others")
            present = [member for member in present if member.id != evicted]
        return actions + self._install_view(present)

    def _member_to_evict(self, present: list[MemberInfo]) -> str | None:
        """Return the member to evict because no view works with all members; None if too few views have failed."""
        if any(request.committed > self.view.committed for request in self._requests.values()):
            self._failed_views = 0
        self._failed_views += 1
        if self._failed_views < MAX_FAILED_VIEWS or len(present) < 2:
            return None
        self._failed_views = 0
        suspected = Counter(request.suspect for request in self._requests.values())
        newest_first = [member.id for member in reversed(present)]
        return max(newest_first, key=suspected.__getitem__)

    def _install_view(self, members: Iterable[MemberInfo]) -> list[Action]:
        committed = max((request.committed for request in self._requests.values()), default=self.view.committed)
        members = tuple(members)
        self.view = View(self.view.number + 1, members, committed)
        self._present = {member.id for member in members}
        for member in members:
            self._waiting.pop(member.id, None)
        self._requests.clear()
        self._view_ended = False
        self.deadline_s = None
        messages: list[Message] = [self.view, NewMembersWait()] if self._waiting else [self.view]
        return [Persist(self.view), *(SendTo(member.id, message) for message in messages for member in members)]

    def _invalidate_view(self, now_s: float) -> list[Action]:
        self._end_view(now_s)
        return [
            SendTo(member.id, ViewInvalidated(self.view.number))
            for member in self._present_members()
            if member.id not in self._requests
        ]

    def _present_members(self) -> list[MemberInfo]:
        return [member for member in self.view.members if member.id in self._present]

    def _end_view(self, now_s: float) -> None:
        self._view_ended = True
        if self.deadline_s is None:
            self.deadline_s = now_s + self._regroup_timeout_s

    def _enforce_deadline(self, now_s: float) -> list[Action]:
        """After the deadline, stop waiting for members that did not reconnect, or evict those that did not ask for the next view."""
        if self.deadline_s is None or now_s < self.deadline_s:
            return []
        self.deadline_s = None
        actions: list[Action] = []
        if self._absent:
            self._absent.clear()
            actions += self._invalidate_view(now_s)  # starts the deadline of the other members
        elif self._view_ended:
            for member_id in sorted(self._present - self._requests.keys()):
                reason = f"it did not ask for the next view within {self._regroup_timeout_s:g} s"
                actions += self._evict(member_id, reason)
        return actions

    def _evict(self, member_id: str, reason: str) -> list[Action]:
        self._remove(member_id)
        return [SendTo(member_id, Evicted(reason))]

    def _remove(self, member_id: str) -> None:
        self._present.discard(member_id)
        self._requests.pop(member_id, None)
