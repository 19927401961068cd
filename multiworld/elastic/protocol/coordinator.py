"""Decides the members of the next epoch of an elastic world. Pure: events and the time in, actions out, without clock and I/O.

There is one coordinator per world, in the rendezvous. The world consists of the members that can reach it. So the two sides of a
partition cannot both continue, and any number of members may be lost, rank 0 included, as long as one remains. The rules:

1. An epoch ends for all members at once. When a member is lost, the others receive `Void` and ask for the next epoch.
2. The next epoch is decided when every connected member has asked. A member that does not ask within `patience_s` is evicted.
3. Newcomers are admitted only when all members that asked are at a boundary. Boundaries are counted and stored in the view, so a member
   that missed the decision, because another member was lost or the rendezvous was restarted, is told again.
4. Two members that repeatedly lose each other while both reach the rendezvous cannot both stay. After `ATTEMPTS` epochs in which no
   round was closed, the member with the most accusers is evicted; the newest one among equals, or if there are no accusers.
5. Epoch numbers only increase. Messages about another epoch than the current one are obsolete and ignored.
6. An evicted member cannot come back under its old id.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from multiworld.elastic.protocol.messages import Ask, Evicted, Leave, MemberInfo, Message, Unchanged, View, Void

ATTEMPTS = 3
"""Consecutive epochs without a closed round and without a lost member, after which one member is evicted."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Send the message to this member."""

    member_id: str
    message: Message


@dataclass(frozen=True, slots=True)
class Remember:
    """Store this view, which is valid from now on, persistently before any message about it is sent."""

    view: View


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the connection to this member."""

    member_id: str


Action = Tell | Remember | Drop


@dataclass(slots=True)
class _Troubles:
    """Epochs that ended without a lost member since the last closed round."""

    closed: int = -1
    attempts: int = 0
    accusers: dict[str, set[str]] = field(default_factory=dict)
    """Accused member → its accusers."""

    def add(self, asks: dict[str, Ask]) -> None:
        self.attempts += 1
        for asker, ask in asks.items():
            if ask.accused in asks and ask.accused != asker:
                self.accusers.setdefault(ask.accused, set()).add(asker)


class Coordinator:
    """Decides the epochs of one elastic world.

    Args:
        first_size: number of newcomers with which the first epoch starts; also the first epoch after all members have gone.
        patience_s: seconds that a connected member may take to ask after its epoch is over; also seconds that members may take to
            reconnect after a restart of the rendezvous.
        view: the last stored view after a restart; None at the first start.
        now_s: the current time, on the clock of all `now_s` arguments.
    """

    def __init__(
        self, *, first_size: int = 1, patience_s: float = 10.0, view: View | None = None, now_s: float = 0.0
    ) -> None:
        if first_size < 1 or patience_s <= 0:
            raise ValueError(f"first_size must be at least 1 and patience_s over 0, got {first_size} and {patience_s}")
        self.view = view or View(0, ())
        self._first_size = first_size
        self._patience_s = patience_s
        self._present: set[str] = set()
        self._absent = set(self.view.ids())  # members that may reconnect after a restart of the rendezvous
        self._waiting: dict[str, MemberInfo] = {}  # newcomers, in the order of their arrival
        self._asks: dict[str, Ask] = {}
        self._over = False  # whether the current epoch is over
        self._deadline_s: float | None = now_s + patience_s if self._absent else None
        self._troubles = _Troubles()

    @property
    def empty(self) -> bool:
        """Whether the world has no members, no newcomers, and no members that may reconnect."""
        return not (self._present or self._absent or self._waiting)

    @property
    def waiting(self) -> int:
        """Number of newcomers that wait for admission."""
        return len(self._waiting)

    @property
    def due_s(self) -> float | None:
        """Time of the next call of `tick`; None if there is no deadline."""
        return self._deadline_s

    def may_resume(self, member_id: str) -> bool:
        """Return whether this member of the stored epoch may reconnect."""
        return member_id in self._absent

    # -- events --------------------------------------------------------------------------------------------------------------

    def join(self, member: MemberInfo, now_s: float) -> list[Action]:
        """A newcomer connected, or a member reconnected after a restart of the rendezvous."""
        if member.id in self._absent:
            self._absent.discard(member.id)
            self._present.add(member.id)
            told: list[Action] = [Tell(member.id, self.view)]  # the rendezvous may have ended before it sent the view
            if self._over:
                told.append(Tell(member.id, Void(self.view.epoch)))
            return told + self._decide(now_s)
        self._waiting[member.id] = member
        return self._decide(now_s)

    def heard(self, member_id: str, message: Message, now_s: float) -> list[Action]:
        """A member or newcomer sent a message."""
        match message:
            case Ask(epoch=epoch) if member_id in self._present and epoch == self.view.epoch:
                if message.boundary and message.boundaries < self.view.boundaries:
                    return [Tell(member_id, Unchanged(epoch, self.view.boundaries))]
                self._asks[member_id] = message
                if not message.boundary:
                    self._end_epoch(now_s)
                return self._decide(now_s)
            case Leave():
                return [*self.lost(member_id, now_s), Drop(member_id)]
        return []

    def lost(self, member_id: str, now_s: float) -> list[Action]:
        """The connection to a member or newcomer ended."""
        self._waiting.pop(member_id, None)
        if member_id not in self._present:
            return self._decide(now_s)
        self._part_with(member_id)
        self._troubles = _Troubles()
        return [*self._give_up_epoch(now_s), *self._decide(now_s)]

    def tick(self, now_s: float) -> list[Action]:
        """The deadline `due_s` may have passed."""
        return self._decide(now_s)

    # -- decisions -------------------------------------------------------------------------------------------------------------

    def _decide(self, now_s: float) -> list[Action]:
        actions = self._evict_the_late(now_s)
        if not self._present and not self._absent:
            if len(self._waiting) >= self._first_size:
                actions += self._announce(self._waiting.values(), boundary=True)
        elif not self._absent and self._asks.keys() >= self._present:
            actions += self._go_on()
        return actions

    def _go_on(self) -> list[Action]:
        """Decide the next epoch. All connected members have asked."""
        here = [member for member in self.view.members if member.id in self._present]
        boundary = all(ask.boundary for ask in self._asks.values())
        if boundary and not self._over and not self._waiting:
            self._asks.clear()
            self.view = replace(self.view, boundaries=self.view.boundaries + 1)
            unchanged = Unchanged(self.view.epoch, self.view.boundaries)
            return [Remember(self.view), *(Tell(member.id, unchanged) for member in here)]
        if boundary:
            return self._announce([*here, *self._waiting.values()], boundary=True)
        actions: list[Action] = []
        if len(here) == len(self.view.members) and (out := self._unbearable(here)):
            actions = self._evict(out, "others lost it again and again, or it them")
            here = [member for member in here if member.id != out]
        return actions + self._announce(here, boundary=False)

    def _unbearable(self, here: list[MemberInfo]) -> str | None:
        """Return the member to evict because no epoch works with all members; None if there were too few attempts."""
        closed = max(ask.closed for ask in self._asks.values())
        if closed > self._troubles.closed:
            self._troubles = _Troubles(closed)
        self._troubles.add(self._asks)
        if self._troubles.attempts < ATTEMPTS or len(here) < 2:
            return None
        against = Counter({member_id: len(accusers) for member_id, accusers in self._troubles.accusers.items()})
        self._troubles = _Troubles(closed)
        newest_first = [member.id for member in reversed(here)]
        return max(newest_first, key=against.__getitem__)

    def _announce(self, members: Iterable[MemberInfo], *, boundary: bool) -> list[Action]:
        closed = max((ask.closed for ask in self._asks.values()), default=self.view.closed)
        members = tuple(members)
        self.view = View(self.view.epoch + 1, members, closed, self.view.boundaries + boundary)
        self._present = {member.id for member in members}
        for member in members:
            self._waiting.pop(member.id, None)
        self._asks.clear()
        self._over = False
        self._deadline_s = None
        return [Remember(self.view), *(Tell(member.id, self.view) for member in members)]

    def _give_up_epoch(self, now_s: float) -> list[Action]:
        self._end_epoch(now_s)
        return [
            Tell(member.id, Void(self.view.epoch))
            for member in self.view.members
            if member.id in self._present and member.id not in self._asks
        ]

    def _end_epoch(self, now_s: float) -> None:
        self._over = True
        if self._deadline_s is None:
            self._deadline_s = now_s + self._patience_s

    def _evict_the_late(self, now_s: float) -> list[Action]:
        """After the deadline, give up the members that did not reconnect, or evict those that did not ask."""
        if self._deadline_s is None or now_s < self._deadline_s:
            return []
        self._deadline_s = None
        actions: list[Action] = []
        if self._absent:
            self._absent.clear()
            actions += self._give_up_epoch(now_s)  # starts the deadline of the other members
        elif self._over:
            for member_id in sorted(self._present - self._asks.keys()):
                actions += self._evict(member_id, f"its epoch was over, and it did not ask for {self._patience_s:g} s")
        return actions

    def _evict(self, member_id: str, reason: str) -> list[Action]:
        self._part_with(member_id)
        return [Tell(member_id, Evicted(reason)), Drop(member_id)]

    def _part_with(self, member_id: str) -> None:
        self._present.discard(member_id)
        self._asks.pop(member_id, None)
