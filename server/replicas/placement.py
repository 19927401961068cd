"""Assigns workers to slots: the slot for a joining worker, and the promotion of spares. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from multiworld_serving.server.replicas.link_types import SlotId
from multiworld_serving.server.replicas.worker_link import WorkerLink
from multiworld_serving.server.snapshots import FailureSnapshot

_LEAST_WEIGHT = 0.01
"""Weight of a stage whose load is not known yet."""


@dataclass(slots=True, eq=False)
class Slot:
    """A named place for one replica of one stage, or for one spare.

    The replica is the worker's copy of the stage, and ends with its link. The slot stays for the next worker, so that a metric label
    per slot has bounded cardinality.

    Attributes:
        stage: None for a spare.
        link: the worker in this slot; it stays here after it broke, until another worker takes the slot.
        broken_at_s: when the last replica was lost, as `time.monotonic()`; None while the slot serves.
    """

    stage: int | None
    index: int
    link: WorkerLink | None = None
    last_failure: FailureSnapshot | None = None
    broken_at_s: float | None = None

    @property
    def id(self) -> SlotId:
        return SlotId(self.stage, self.index)

    @property
    def free(self) -> bool:
        return self.link is None or self.link.state == "broken"

    @property
    def ready(self) -> bool:
        return self.link is not None and self.link.state == "ready"


@dataclass(slots=True)
class Placement:
    """All slots.

    Each stage has `replicas` slots from the start. Then `spares_wanted` workers become spares. Further workers get extra slots, which
    are removed when they leave.
    """

    num_stages: int
    replicas: int
    spares_wanted: int = 0
    all: list[Slot] = field(default_factory=list)
    """The slots of the stages."""
    wanted: tuple[float, ...] = ()
    """Replicas of each stage that the load needs; empty: unknown. Only their ratio matters, because a leader knows its own load."""
    spares: list[Slot] = field(default_factory=list)
    """The slots of the spares that are connected."""
    _generations: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.all = [Slot(stage, index) for stage in range(self.num_stages) for index in range(self.replicas)]

    def of_stage(self, stage: int | None) -> list[Slot]:
        return [slot for slot in self.all if slot.stage == stage]

    def free_slot(self, stage: int) -> Slot:
        """A free slot of this stage for a joining worker.

        If there is none, the worker becomes a spare if spares are wanted, or else gets an extra slot of the stage.
        """
        if not self._has_free_slot(stage) and len(self.spares) < self.spares_wanted:
            return self._spare_slot()
        return self._slot_of_stage(stage)

    def slot_holding(self, held: Collection[int]) -> Slot:
        """The slot for a worker that keeps the stages that it holds, at least one: of a spare if it holds all, otherwise of the stage."""
        if len(held) == self.num_stages > 1:
            return self._spare_slot()
        return self.free_slot(0) if self.num_stages == 1 else self._slot_of_stage(min(held))

    def _spare_slot(self) -> Slot:
        taken = {link.world_name for link in self.links()}
        index = next(index for index in range(len(taken) + 1) if f"spare{index}" not in taken)
        self.spares.append(slot := Slot(None, index))
        return slot

    def _slot_of_stage(self, stage: int) -> Slot:
        """A free slot of this stage, or an extra one."""
        for slot in self.of_stage(stage):
            if slot.free:
                return slot
        indices = {slot.index for slot in self.of_stage(stage)}
        slot = Slot(stage, next(index for index in range(len(indices) + 1) if index not in indices))
        self.all.append(slot)
        self.all.sort(key=lambda slot: (slot.stage, slot.index))
        return slot

    def choose_stage(
        self,
        host: str = "",
        held: Collection[int] = (),
        too_large: Collection[int] = (),
    ) -> int:
        """Choose the stage for a joining worker on `host`, which has the stages `held` in memory.

        A stage without replicas (serving or joining) is first. Then a stage of `held` with a free slot. Then the stage with the fewest
        replicas; among equals, the one with the fewest replicas on that host, because a host may fail as a whole, then the earliest. If
        all stages have `replicas`, a stage of `held` is first, and then the one with the fewest replicas for its load.

        Args:
            too_large: stages that do not fit into its memory. They are chosen only if no stage fits.
        """
        taken = [self._taken(stage, host) for stage in range(self.num_stages)]
        extra = all(replicas >= self.replicas for replicas, _ in taken)

        def rank(stage: int) -> tuple[bool, bool, float, int]:
            replicas, on_host = taken[stage]
            stays = stage in held and (extra or self._has_free_slot(stage))
            return replicas > 0, not stays, replicas / self._weight(stage) if extra else replicas, on_host

        fitting = [stage for stage in range(self.num_stages) if stage not in too_large]
        return min(fitting or range(self.num_stages), key=rank)

    def _weight(self, stage: int) -> float:
        """The load of a stage relative to that of the most loaded one."""
        most = max(self.wanted, default=0.0)
        return max(self.wanted[stage] / most, _LEAST_WEIGHT) if most else 1.0

    @property
    def settled(self) -> bool:
        """Whether no worker is joining or draining."""
        return all(slot.ready or slot.free for slot in (*self.all, *self.spares))

    @property
    def fully_replicated(self) -> bool:
        """Whether every stage has at least `replicas` ready replicas, and no worker is joining or draining."""
        return self.settled and all(self._ready_in(stage) >= self.replicas for stage in range(self.num_stages))

    def remove_extra_slot(self, slot: Slot) -> None:
        """Remove this slot if its stage has more than `replicas` slots. Call when its worker has left for good."""
        if slot in self.all and len(self.of_stage(slot.stage)) > self.replicas:
            self.all.remove(slot)

    def next_generation(self, world_name: str) -> int:
        """The generation of a world that is about to form. Starts at 1."""
        self._generations[world_name] += 1
        return self._generations[world_name]

    def links(self) -> Iterator[WorkerLink]:
        """All live links, including those of spares."""
        return (slot.link for slot in (*self.all, *self.spares) if slot.link is not None and not slot.free)

    def live_link_of(self, worker: str) -> WorkerLink | None:
        """The live link of the worker with this name, if there is one."""
        return next((link for link in self.links() if link.worker == worker), None)

    def promote_spares(self) -> Iterator[tuple[Slot, WorkerLink]]:
        """Move ready spares into free slots, first of the stage with the fewest ready replicas. Yields each spare that was moved.

        The order of the workers' names decides, so that several leaders choose the same spare.
        """
        while (spare := _first_by_name(slot for slot in self.spares if slot.ready)) is not None:
            empty = min(
                (slot for slot in self.all if slot.free), key=lambda slot: self._ready_in(slot.stage), default=None
            )
            if empty is None:
                return
            assert spare.link is not None
            self.spares.remove(spare)
            empty.link, spare.link.slot = spare.link, empty.id
            yield empty, spare.link

    def stages_without_worker(self) -> Iterator[int]:
        """The stages that have no worker, not even one that is joining."""
        return (stage for stage in range(self.num_stages) if all(slot.free for slot in self.of_stage(stage)))

    def reassignment_candidate(self) -> WorkerLink | None:
        """A replica of the stage with the most ready replicas, to be moved to a stage without workers; None if no stage has two.

        Only workers that obey this leader are moved.
        """
        stage = max(range(self.num_stages), key=self._ready_in)
        if self._ready_in(stage) < 2:
            return None
        return next((link for link in ready_links(self.of_stage(stage)) if not link.obeys), None)

    def _has_free_slot(self, stage: int) -> bool:
        return any(slot.free for slot in self.of_stage(stage))

    def _taken(self, stage: int, host: str) -> tuple[int, int]:
        """The number of replicas of a stage, and how many of them are on that host."""
        hosts = [slot.link.request.host for slot in self.of_stage(stage) if slot.link is not None and not slot.free]
        return len(hosts), hosts.count(host)

    def slot_of(self, link: WorkerLink) -> Slot | None:
        """The slot that this link was assigned to last, unless another worker has taken it."""
        return next((slot for slot in (*self.all, *self.spares) if slot.link is link), None)

    def _ready_in(self, stage: int | None) -> int:
        return sum(slot.ready for slot in self.all if slot.stage == stage)


def _first_by_name(slots: Iterable[Slot]) -> Slot | None:
    """The slot whose worker has the first name in alphabetical order."""
    return min(slots, key=lambda slot: slot.link.worker if slot.link is not None else "", default=None)


def ready_links(slots: Iterable[Slot]) -> list[WorkerLink]:
    """The links in these slots that are ready."""
    return [slot.link for slot in slots if slot.link is not None and slot.ready]
