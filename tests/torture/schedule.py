"""The plan of one round of the torture test: a pure function of the seed and the number of the round.

A round has worlds over a few processes. In each world its members run phases; in a phase every member starts its part of all
operations at once and awaits them. Faults hit one process, or one world of it, during a phase.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch

from multiworld import Cause
from tests.torture.data import MOVED, REDUCED, random_of

PROCESSES = 4
SPARED = 2
"""The first processes live as long as the run: no fault hits all their worlds."""
FAULT_TAG = 1 << 28
"""Tags from here on belong to messages of faults."""

FaultKind = str
"""The kinds of faults, the keys of `CAUSES`.

    kill      the process ends by SIGKILL
    exit      the process ends like a normal program
    stop      SIGSTOP, and SIGCONT when the other members have detected it
    pause     SIGSTOP, and SIGCONT at once
    cleanup   the process closes all its worlds at once
    close     the process closes one world and waits until it is reclaimed
    leave     the process closes one world without waiting
    cancel    the process cancels an operation
    timeout   an operation exceeds its `timeout_s`
    mismatch  the process sends a message of another size than its receiver expects
    disagree  the process starts another collective than the others, in a world with `verify_collectives`
    cut       the peer connection to one member ends
    lose      the control connection to one member ends
"""
OF_PROCESSES: tuple[FaultKind, ...] = ("kill", "exit", "stop", "pause", "cleanup")
OF_WORLDS: tuple[FaultKind, ...] = ("close", "leave", "cancel", "timeout", "mismatch", "disagree", "cut", "lose")
MADE_OF_OPERATIONS: tuple[FaultKind, ...] = ("cancel", "timeout", "mismatch", "disagree", "cut")
"""Faults that consist of additional operations."""
ENDING: tuple[FaultKind, ...] = ("kill", "exit")
"""After these faults the process cannot report."""
CAUSES: dict[FaultKind, frozenset[Cause]] = {
    "kill": frozenset({Cause.EXIT, Cause.TRANSPORT}),
    "exit": frozenset({Cause.LEFT, Cause.ABORTED, Cause.EXIT, Cause.TRANSPORT}),
    "stop": frozenset({Cause.HANG}),
    "pause": frozenset({Cause.HANG}),
    "cleanup": frozenset({Cause.LEFT}),
    "close": frozenset({Cause.LEFT}),
    "leave": frozenset({Cause.LEFT}),
    "cancel": frozenset({Cause.ABORTED}),
    "timeout": frozenset({Cause.TIMEOUT}),
    "mismatch": frozenset({Cause.ERROR}),
    "disagree": frozenset({Cause.ERROR}),
    "cut": frozenset({Cause.TRANSPORT, Cause.EXIT}),
    "lose": frozenset({Cause.EXIT, Cause.TRANSPORT}),
}
"""Possible causes that the members of a world report."""

COLLECTIVES = (
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "barrier",
)
REDUCING = ("reduce", "all_reduce", "reduce_scatter", "reduce_scatter_tensor")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of all members of a world.

    Attributes:
        key: identifies it, and determines contents and layout of its tensors.
        count: elements of the tensor; of one rank's chunk if there is one per rank.
        root: rank, if the collective has one.
        op: name of the `ReduceOp`, if it reduces.
    """

    key: str
    kind: str
    dtype: torch.dtype
    count: int
    root: int
    op: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message between two ranks of a world; those of one tag arrive in order."""

    key: str
    src: int
    dst: int
    tag: int
    dtype: torch.dtype
    count: int


@dataclass(frozen=True, slots=True)
class Phase:
    collectives: tuple[Collective, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class PlannedWorld:
    """Attributes:
    members: the process of each rank.
    lasting: whether it lives as long as the run. No fault may reach it.
    """

    name: str
    members: tuple[int, ...]
    verified: bool
    phases: tuple[Phase, ...]
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """Attributes:
    number: of this fault in its round.
    process: the process that it hits.
    world: name of the world that it hits, or whose phase triggers it.
    phase: number of the phase that triggers it.
    delay_s: seconds after its process started that phase.
    peer: another rank of that world, if the fault needs one.
    """

    number: int
    kind: FaultKind
    process: int
    world: str
    phase: int
    delay_s: float
    peer: int

    @property
    def of_process(self) -> bool:
        """Whether it affects all worlds of the process."""
        return self.kind in OF_PROCESSES


@dataclass(frozen=True, slots=True)
class Round:
    worlds: tuple[PlannedWorld, ...]
    faults: tuple[Fault, ...]

    def world(self, name: str) -> PlannedWorld:
        return next(world for world in self.worlds if world.name == name)

    def faults_of(self, world: PlannedWorld) -> list[Fault]:
        """The faults that concern this world."""
        return [
            fault
            for fault in self.faults
            if (fault.process in world.members if fault.of_process else fault.world == world.name)
        ]

    def must_break(self, world: PlannedWorld) -> bool:
        """Whether its members must see it end. A pause may go unnoticed."""
        return any(fault.kind != "pause" for fault in self.faults_of(world))

    def made_of_operations(self, world: PlannedWorld, phase: int) -> list[Fault]:
        """The faults of this phase that are operations of its members."""
        return [
            fault
            for fault in self.faults
            if fault.kind in MADE_OF_OPERATIONS and (fault.world, fault.phase) == (world.name, phase)
        ]


def plan_round(seed: int, number: int) -> Round:
    """Round `number` of the run of that seed."""
    rng = random_of(f"{seed}/{number}")
    worlds = tuple(_world(rng, f"w{index}", f"{seed}/{number}/w{index}") for index in range(rng.randint(2, 6)))
    return Round((_lasting_world(rng, f"{seed}/{number}/home"), *worlds), tuple(_faults(rng, worlds)))


def _lasting_world(rng: Random, key: str) -> PlannedWorld:
    """A world of the spared processes."""
    phases = tuple(_phase(rng, SPARED, f"{key}/{number}") for number in range(3))
    return PlannedWorld("home", tuple(range(SPARED)), True, phases, lasting=True)


def _world(rng: Random, name: str, key: str) -> PlannedWorld:
    size = rng.choice((2, 2, 3, 3, 4))
    members = tuple(rng.sample(range(PROCESSES), size))
    phases = tuple(_phase(rng, size, f"{key}/{number}") for number in range(rng.randint(2, 8)))
    return PlannedWorld(name, members, rng.random() < 0.4, phases)


def _phase(rng: Random, size: int, key: str) -> Phase:
    style = rng.choice(("one collective", "messages", "both", "many collectives"))
    collectives = {"one collective": 1, "messages": 0, "both": rng.randint(1, 2), "many collectives": rng.randint(2, 5)}
    messages = rng.randint(1, 8) if style in ("messages", "both") else 0
    return Phase(
        tuple(
            collective_of(rng, rng.choice(COLLECTIVES), size, f"{key}/c{index}") for index in range(collectives[style])
        ),
        tuple(_message(rng, size, f"{key}/m{index}") for index in range(messages)),
    )


def collective_of(rng: Random, kind: str, size: int, key: str) -> Collective:
    """A collective of this kind in a world of this size. The other properties are random."""
    op = rng.choice(list(REDUCED)) if kind in REDUCING else ""
    dtype = rng.choice(REDUCED[op] if op else MOVED)
    return Collective(key, kind, dtype, _count(rng, dtype), rng.randrange(size), op)


def _message(rng: Random, size: int, key: str) -> Message:
    src, dst = rng.sample(range(size), 2)
    dtype = rng.choice(MOVED)
    return Message(key, src, dst, rng.randrange(3), dtype, _count(rng, dtype))


def _count(rng: Random, dtype: torch.dtype) -> int:
    """Usually small, occasionally some MB."""
    sizes = (
        0,
        1,
        rng.randint(2, 64),
        rng.randint(65, 1 << 14),
        rng.randint(1 << 14, 1 << 18),
        rng.randint(1 << 20, 6 << 20),
    )
    size = rng.choices(sizes, (8, 8, 40, 34, 8, 2))[0]
    return -(-size // dtype.itemsize)


def _faults(rng: Random, worlds: tuple[PlannedWorld, ...]) -> Iterator[Fault]:
    """None, one or two. Two faults affect disjoint worlds, or both affect whole processes."""
    kinds = list(OF_PROCESSES + OF_WORLDS)
    if not any(world.verified for world in worlds):
        kinds.remove("disagree")
    struck: list[Fault] = []
    for _ in range(rng.choice((0, 1, 1, 2))):
        fault = _fault(rng, worlds, rng.choice(kinds), len(struck))
        if fault is not None and all(_compatible(fault, other, worlds) for other in struck):
            struck.append(fault)
            yield fault


def _fault(rng: Random, worlds: tuple[PlannedWorld, ...], kind: FaultKind, number: int) -> Fault | None:
    world = rng.choice([world for world in worlds if world.verified or kind != "disagree"])
    mortal = [process for process in world.members if process >= SPARED or kind in OF_WORLDS]
    if not mortal:
        return None
    process = rng.choice(mortal)
    rank = world.members.index(process)
    peer = rng.choice([other for other in range(len(world.members)) if other != rank])
    if kind == "lose" and rank != 0:
        peer = 0  # the others have a control connection with rank 0 only
    delay_s = rng.choice((0.0, rng.uniform(0, 0.002), rng.uniform(0, 0.02), rng.uniform(0, 0.1)))
    return Fault(number, kind, process, world.name, rng.randrange(len(world.phases)), delay_s, peer)


def _compatible(fault: Fault, other: Fault, worlds: tuple[PlannedWorld, ...]) -> bool:
    if fault.process == other.process or ("stop" in (fault.kind, other.kind) and "pause" in (fault.kind, other.kind)):
        return False
    if fault.kind == other.kind == "stop":
        return False  # two members that are stopped and continued together may not notice
    plan = Round(worlds, (fault, other))
    shared = any(len(plan.faults_of(world)) > 1 for world in worlds)
    return not shared or (fault.of_process and other.of_process)
