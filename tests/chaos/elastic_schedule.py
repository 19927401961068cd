"""The schedule of a torture test of an elastic world: calls, faults and newcomers, determined by a seed. Pure.

The members after each step follow from the schedule alone, independent of timing: a frozen member stays frozen until it is evicted, and a
cut connection between members costs a view change but no member.
"""

from dataclasses import dataclass
from random import Random

INITIAL_MEMBERS = 4
MAX_SIZE = 5
MAX_STEP_BYTES = 4_000_000
DTYPES = {"float32": 4, "float64": 8, "bfloat16": 2, "int32": 4, "int64": 8}
OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
COUNTS = (0, 0, 1, 2, 7, 100, 2048, 5000, 70_000, 300_000, 600_000)
LOSSES = ("kill", "kill", "kill", "leave", "cancel", "sever", "freeze")
"""Faults that cost a member: it is killed, leaves in the middle of a call, has its call cancelled, loses its connection to the rendezvous,
or is stopped until it is evicted."""


@dataclass(frozen=True, slots=True)
class Call:
    """One all-reduce of many tensors, identical at all members except for the tensors' content.

    Attributes:
        key: seed of the tensors' content.
        tensors: dtype and number of elements of each.
    """

    key: str
    tensors: tuple[tuple[str, int], ...]
    op: str
    max_in_flight: int


@dataclass(frozen=True, slots=True)
class Fault:
    """Attributes:
    kind: one of `LOSSES`, "pause" (stopped briefly) or "cut" (a connection to another member).
    after_events: number of exchanges and messages of the step that the victim starts before the fault; 0: triggered by time.
    after_s: seconds from the start of the step to the fault; at the end of the step if it is shorter.
    choice: which connection.
    """

    kind: str
    victim: int
    after_events: int
    after_s: float
    choice: int


@dataclass(frozen=True, slots=True)
class Step:
    """Attributes:
    members: before the step, numbered in the order in which they joined.
    call: None for `update_membership`.
    newcomers: members that wait to be admitted by it.
    doomed: another newcomer that is killed while it waits; 0 for none.
    restart_after_s: when the rendezvous server is killed and restarted; None: not.
    """

    number: int
    members: tuple[int, ...]
    call: Call | None
    faults: tuple[Fault, ...]
    newcomers: tuple[int, ...] = ()
    doomed: int = 0
    restart_after_s: float | None = None

    @property
    def lost(self) -> set[int]:
        return {fault.victim for fault in self.faults if fault.kind in LOSSES}

    @property
    def members_after(self) -> tuple[int, ...]:
        return (*(each for each in self.members if each not in self.lost), *self.newcomers)


class Schedule:
    """An endless sequence of steps, determined by the seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._chance = Random(f"elastic worlds {seed}")
        self._members = tuple(range(1, INITIAL_MEMBERS + 1))
        self._last_member = INITIAL_MEMBERS
        self._steps = 0
        self._favourite = 0

    @property
    def members(self) -> tuple[int, ...]:
        """The members before the next step."""
        return self._members

    def next(self) -> Step:
        self._steps += 1
        if self._steps % 50 == 1 or self._favourite not in self._members:
            self._favourite = self._chance.choice(self._members)
        wanted = 1.0 if len(self._members) == 1 else 0.5 if len(self._members) < 3 else 0.15
        step = self._update() if self._chance.random() < wanted else self._reduce()
        self._members = step.members_after
        return step

    def _update(self) -> Step:
        chance, room = self._chance, MAX_SIZE - len(self._members)
        few = len(self._members) < 3
        newcomers = tuple(
            self._new_member() for _ in range(chance.randint(min(1, room), min(2, room)) if few else min(1, room))
        )
        doomed = self._new_member() if chance.random() < 0.2 else 0
        faults = self._losses(1) if chance.random() < 0.3 else ()
        return Step(self._steps, self._members, None, faults, newcomers, doomed)

    def _reduce(self) -> Step:
        chance = self._chance
        faults: tuple[Fault, ...] = ()
        if chance.random() < 0.45:
            faults = self._losses(2 if chance.random() < 0.2 else 1)
        if chance.random() < 0.25:
            harmed = {fault.victim for fault in faults}
            if others := [each for each in self._members if each not in harmed]:
                faults += (self._fault(chance.choice(("cut", "cut", "pause")), chance.choice(others)),)
        restarts = chance.random() < 0.05 and not any(fault.kind == "sever" for fault in faults)
        return Step(
            self._steps,
            self._members,
            self._call(),
            faults,
            restart_after_s=chance.uniform(0.0, 0.3) if restarts else None,
        )

    def _losses(self, most: int) -> tuple[Fault, ...]:
        """Faults that cost members; at least one member stays. One member is usually spared, so that it becomes old."""
        chance = self._chance
        spared = self._favourite if chance.random() < 0.8 else 0
        victims = [each for each in self._members if each != spared]
        victims = chance.sample(victims, min(most, len(victims), len(self._members) - 1))
        return tuple(self._fault(chance.choice(LOSSES), victim) for victim in victims)

    def _fault(self, kind: str, victim: int) -> Fault:
        chance = self._chance
        by_events = chance.random() < 0.6
        events = chance.choice((1, 2, chance.randint(1, 10), chance.randint(1, 40))) if by_events else 0
        return Fault(kind, victim, events, chance.uniform(0.0, 0.15), chance.randrange(1 << 16))

    def _call(self) -> Call:
        chance = self._chance
        op, dtypes = chance.choice(OPS), tuple(DTYPES)
        tensors: list[tuple[str, int]] = []
        room = MAX_STEP_BYTES
        for _ in range(chance.choice((1, 2, 5, chance.randint(1, 60)))):
            dtype, count = chance.choice(dtypes), chance.choice(COUNTS)
            if count * DTYPES[dtype] <= room:
                tensors.append((dtype, count))
                room -= count * DTYPES[dtype]
        if chance.random() < 0.03:
            tensors = [(dtype, 0) for dtype, _ in tensors]
        key = f"{self._seed}/{self._steps}"
        return Call(key, tuple(tensors), op, chance.choice((1, 2, 16)))

    def _new_member(self) -> int:
        self._last_member += 1
        return self._last_member
