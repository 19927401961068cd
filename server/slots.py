"""Which worker serves which stage: slots, the choice of one for a newcomer, and who steps in when one falls empty. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from server.predictor import FailureSnapshot

if TYPE_CHECKING:
    from server.link import Link


@dataclass(slots=True, eq=False)
class Slot:
    """A place for one replica of one stage, or for one spare. It outlives the workers in it, and gives metrics a label that
    does not grow.

    Attributes:
        stage: None for a spare's.
        broken_at_s: when the replica that served here last was lost, until another serves.
    """

    stage: int | None
    index: int
    link: Link | None = None
    last_failure: FailureSnapshot | None = None
    broken_at_s: float | None = None

    @property
    def name(self) -> str:
        return f"spare{self.index}" if self.stage is None else f"s{self.stage}.r{self.index}"

    @property
    def free(self) -> bool:
        return self.link is None or self.link.state == "broken"

    @property
    def ready(self) -> bool:
        return self.link is not None and self.link.state == "ready"


@dataclass(slots=True)
class Slots:
    """All slots. There are `replicas` of each stage from the start; then come `spares_wanted` spares; further workers make
    further replicas, which go with them when they leave."""

    num_stages: int
    replicas: int
    spares_wanted: int = 0
    all: list[Slot] = field(default_factory=list)
    """Those of the stages."""
    spares: list[Slot] = field(default_factory=list)
    """Those that are taken."""
    _epochs: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.all = [Slot(stage, index) for stage in range(self.num_stages) for index in range(self.replicas)]

    def of_stage(self, stage: int | None) -> list[Slot]:
        return [slot for slot in self.all if slot.stage == stage]

    def choose(self, host: str = "") -> Slot:
        """For a newcomer on `host`: a free slot of the stage that has fewest replicas serving or on their way; among equals of the one
        that has fewest on that host, which may be lost as a whole, then the earliest; a spare's once all have theirs."""
        stage = min(range(self.num_stages), key=lambda stage: self._taken(stage, host))
        for slot in self.of_stage(stage):
            if slot.free:
                return slot
        if len(self.spares) < self.spares_wanted:
            taken = {link.world_name for link in self.links()}
            index = next(index for index in range(len(taken) + 1) if f"spare{index}" not in taken)
            self.spares.append(slot := Slot(None, index))
            return slot
        indices = {slot.index for slot in self.of_stage(stage)}
        slot = Slot(stage, next(index for index in range(len(indices) + 1) if index not in indices))
        self.all.append(slot)
        self.all.sort(key=lambda slot: (slot.stage, slot.index))
        return slot

    @property
    def whole(self) -> bool:
        """Whether every stage has its replicas, all ready, and nobody is on the way or leaving. A further replica that is gone for good is
        not missed: nobody has to start it again."""
        settled = all(slot.ready or slot.free for slot in self.all)
        return settled and all(self._ready_in(stage) >= self.replicas for stage in range(self.num_stages))

    def left(self, slot: Slot) -> None:
        """Its worker has gone on purpose. A stage that had more slots than it is to have has this one no longer, or a service
        that was made smaller again would wait for ever for workers that nobody will start."""
        if slot in self.all and len(self.of_stage(slot.stage)) > self.replicas:
            self.all.remove(slot)

    def next_epoch(self, world_name: str) -> int:
        """Of a world that is about to form. Counts from 1."""
        self._epochs[world_name] += 1
        return self._epochs[world_name]

    def links(self) -> Iterator[Link]:
        """Those that live, spares included."""
        return (slot.link for slot in (*self.all, *self.spares) if slot.link is not None and not slot.free)

    def former_self(self, worker: str) -> Link | None:
        """The live link of a worker of that name, which is asking again and so has lost it."""
        return next((link for link in self.links() if link.worker == worker), None)

    def take_over(self) -> Iterator[tuple[Slot, Link]]:
        """Move ready spares into slots that have fallen empty, those of the poorest stage first; gives each that was moved."""
        while (spare := next((slot for slot in self.spares if slot.ready), None)) is not None:
            empty = min(
                (slot for slot in self.all if slot.free), key=lambda slot: self._ready_in(slot.stage), default=None
            )
            if empty is None:
                return
            assert spare.link is not None
            self.spares.remove(spare)
            empty.link, spare.link.slot = spare.link, empty
            yield empty, spare.link

    def without_worker(self) -> Iterator[int]:
        """The stages that nobody serves nor is on the way to serve."""
        return (stage for stage in range(self.num_stages) if all(slot.free for slot in self.of_stage(stage)))

    def donor(self) -> Link | None:
        """Who can best be spared for a stage that has nobody: a replica of the stage that has most, of two or more."""
        stage = max(range(self.num_stages), key=self._ready_in)
        ready = [slot.link for slot in self.of_stage(stage) if slot.link is not None and slot.ready]
        return ready[-1] if len(ready) > 1 else None

    def _taken(self, stage: int, host: str) -> tuple[int, int]:
        """How many replicas a stage has, and how many of them on that host."""
        hosts = [slot.link.request.host for slot in self.of_stage(stage) if slot.link is not None and not slot.free]
        return len(hosts), hosts.count(host)

    def _ready_in(self, stage: int | None) -> int:
        return sum(slot.ready for slot in self.all if slot.stage == stage)


def ready_links(slots: Iterable[Slot]) -> list[Link]:
    """Of the slots given, the links that are ready."""
    return [slot.link for slot in slots if slot.link is not None and slot.ready]
