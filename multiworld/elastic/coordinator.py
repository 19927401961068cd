"""Who makes up the next epoch of an elastic world. Pure: events and the time in, actions out; it reads no clock and does no I/O.

There is one that decides, outside the ring of the members: who reaches it is the world. So the two sides of a partition cannot both go
on, and any number of members may be lost down to one, rank 0 included. Its rules:

1. An epoch is given up as a whole. When a member of it is lost, all others are told (`Void`), and ask.
2. The next epoch is decided when every member that is still connected has asked; who does not within `patience_s` is evicted.
3. Newcomers are let in only when all who asked stand at a boundary. Boundaries are counted, and what is decided at one is remembered: who
   did not hear it, because somebody was lost or we were restarted just then, is told again.
4. Two members that lose each other again and again while both reach us cannot both stay: after `ATTEMPTS` epochs without a round closed
   the one whom more members accuse goes, of two alike the newer; where nobody can tell whom it lost, the newest.
5. Epochs only ever grow. What is said about another than the current one is old, and ignored.
6. Who was given up does not come back under its old id.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from multiworld.elastic.messages import Ask, Evicted, Leave, Message, Seating, Unchanged, View, Void

ATTEMPTS = 3
"""After so many epochs in a row in which no round was closed although nobody was lost, one who is accused goes."""


@dataclass(frozen=True, slots=True)
class Tell:
    member_id: str
    message: Message


@dataclass(frozen=True, slots=True)
class Remember:
    """This view counts from now on: keep it where it survives us, before anybody is told."""

    view: View


@dataclass(frozen=True, slots=True)
class Drop:
    """The connection to this member is of no use any more."""

    member_id: str


Action = Tell | Remember | Drop


@dataclass(slots=True)
class _Troubles:
    """Epochs that ended with nobody lost, since a round was last closed."""

    closed: int = -1
    attempts: int = 0
    accusers: dict[str, set[str]] = field(default_factory=dict)
    """Accused member → who accused it."""

    def add(self, asks: dict[str, Ask]) -> None:
        self.attempts += 1
        for asker, ask in asks.items():
            if ask.accused in asks and ask.accused != asker:
                self.accusers.setdefault(ask.accused, set()).add(asker)


class Coordinator:
    """
    Args:
        first_size: the first epoch is formed when so many have come; also when all members have gone.
        patience_s: how long a member that is connected may take to ask once its epoch is known to be over, and how long after a restart of
            ours members may take to come back.
        view: what was remembered last, after a restart; None at the first start.
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
        self._absent = set(self.view.ids())  # members that may come back after a restart of ours
        self._waiting: dict[str, Seating] = {}  # newcomers, in the order in which they came
        self._asks: dict[str, Ask] = {}
        self._over = False  # the current epoch
        self._deadline_s: float | None = now_s + patience_s if self._absent else None
        self._troubles = _Troubles()

    @property
    def waiting(self) -> int:
        """How many newcomers wait to be let in."""
        return len(self._waiting)

    @property
    def due_s(self) -> float | None:
        """When `tick` is to be called next."""
        return self._deadline_s

    def may_resume(self, member_id: str) -> bool:
        """Whether this member of the epoch that was remembered may come back."""
        return member_id in self._absent

    # -- events --------------------------------------------------------------------------------------------------------------

    def join(self, member: Seating, now_s: float) -> list[Action]:
        """A newcomer is connected, or a member again after our restart."""
        if member.id in self._absent:
            self._absent.discard(member.id)
            self._present.add(member.id)
            told: list[Action] = [Tell(member.id, self.view)]  # we may have ended before it heard
            if self._over:
                told.append(Tell(member.id, Void(self.view.epoch)))
            return told + self._decide(now_s)
        self._waiting[member.id] = member
        return self._decide(now_s)

    def heard(self, member_id: str, message: Message, now_s: float) -> list[Action]:
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
        """The connection to a member or newcomer has ended."""
        self._waiting.pop(member_id, None)
        if member_id not in self._present:
            return self._decide(now_s)
        self._part_with(member_id)
        self._troubles = _Troubles()
        return [*self._give_up_epoch(now_s), *self._decide(now_s)]

    def tick(self, now_s: float) -> list[Action]:
        """Time has passed."""
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
        """All who are connected have asked."""
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

    def _unbearable(self, here: list[Seating]) -> str | None:
        """Who must go, so that the others get on; None while it is too early to say."""
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

    def _announce(self, members: Iterable[Seating], *, boundary: bool) -> list[Action]:
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
        """When time is up: who was to come back, and who was to ask, and did not."""
        if self._deadline_s is None or now_s < self._deadline_s:
            return []
        self._deadline_s = None
        actions: list[Action] = []
        if self._absent:
            self._absent.clear()
            actions += self._give_up_epoch(now_s)  # the others have their time from now on
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
