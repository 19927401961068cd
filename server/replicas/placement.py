"""The slots of the stages and of spares, and the slot of a joining worker. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from multiworld import Cause
from multiworld_serving.server.replicas.worker import SlotId, Worker
from multiworld_serving.server.snapshots import FailureSnapshot

_LEAST_WEIGHT = 0.01
"""Weight of a stage whose load is not known yet."""


@dataclass(slots=True, eq=False)
class Slot:
    """A named place for one replica of one stage, or for one spare.

    The slot stays for the next worker, so that a metric label per slot has bounded cardinality.

    Attributes:
        worker: stays here after it was lost, until another worker takes the slot.
        lost_at_s: when the last replica failed, as `time.monotonic()`; None while the slot serves.
    """

    id: SlotId
    worker: Worker | None = None
    last_failure: FailureSnapshot | None = None
    lost_at_s: float | None = None

    @property
    def free(self) -> bool:
        return self.worker is None or self.worker.state == "broken"

    @property
    def ready(self) -> bool:
        return self.worker is not None and self.worker.state == "ready"

    @property
    def left(self) -> bool:
        """Whether its worker has left on purpose."""
        return self.worker is not None and self.worker.ending is not None and self.worker.ending.cause == Cause.LEFT


@dataclass(slots=True)
class Placement:
    """All slots.

    Each stage has `replicas` slots from the start. Then `spares_wanted` workers become spares. Further workers get extra slots, which
    are removed when they leave.
    """

    num_stages: int
    replicas: int
    spares_wanted: int = 0
    slots: dict[SlotId, Slot] = field(default_factory=dict)
    """The slots of the stages, and those of connected spares."""
    wanted: tuple[float, ...] = ()
    """Replicas of each stage that the load needs; empty: unknown. Only their ratio matters, because a leader knows its own load."""
    _generations: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for stage in range(self.num_stages):
            for index in range(self.replicas):
                self._add(SlotId(stage, index))

    def _add(self, slot: SlotId) -> Slot:
        return self.slots.setdefault(slot, Slot(slot))

    def of_stage(self, stage: int | None) -> list[Slot]:
        """The slots of a stage in their order; None: of spares."""
        return sorted((slot for id_, slot in self.slots.items() if id_.stage == stage), key=lambda slot: slot.id.index)

    def workers(self, stage: int | None = None) -> Iterator[Worker]:
        """All connected workers, including spares; of one stage if one is given."""
        for slot in self.slots.values():
            if slot.worker is not None and not slot.free and stage in (None, slot.id.stage):
                yield slot.worker

    def ready(self, stage: int | None = None) -> list[Worker]:
        """Those of `workers` that are ready."""
        return [worker for worker in self.workers(stage) if worker.state == "ready"]

    def live_worker(self, name: str) -> Worker | None:
        """The connected worker with this name, if there is one."""
        return next((worker for worker in self.workers() if worker.name == name), None)

    def slot_of(self, worker: Worker) -> Slot | None:
        """The slot that this worker was assigned to last, unless another worker has taken it."""
        slot = self.slots.get(worker.slot)
        return slot if slot is not None and slot.worker is worker else None

    def free_slot(self, stage: int) -> Slot:
        """A free slot of this stage for a joining worker.

        If there is none, the worker becomes a spare if spares are wanted, or else gets an extra slot of the stage.
        """
        is_full = not any(slot.free for slot in self.of_stage(stage))
        if is_full and len(self.of_stage(None)) < self.spares_wanted:
            return self._new_slot(None)
        return self._slot_of_stage(stage)

    def slot_holding(self, held: Collection[int]) -> Slot:
        """The slot for a worker that keeps the stages that it holds, at least one: of a spare if it holds all, otherwise of the stage."""
        if len(held) == self.num_stages > 1:
            return self._new_slot(None)
        return self.free_slot(0) if self.num_stages == 1 else self._slot_of_stage(min(held))

    def _slot_of_stage(self, stage: int) -> Slot:
        return next((slot for slot in self.of_stage(stage) if slot.free), None) or self._new_slot(stage)

    def _new_slot(self, stage: int | None) -> Slot:
        """An extra slot. Its name is not that of the world of a connected worker: a promoted spare keeps its world."""
        taken = {worker.id.world for worker in self.workers()} | {slot.name for slot in self.slots}
        return self._add(
            next(slot for index in range(len(taken) + 1) if (slot := SlotId(stage, index)).name not in taken)
        )

    def remove(self, slot: Slot) -> None:
        """Remove a slot of a spare, or an extra one."""
        self.slots.pop(slot.id, None)

    def is_extra(self, slot: Slot) -> bool:
        """Whether its stage has more than `replicas` slots. Spares have no slot without a worker."""
        return slot.id.stage is None or len(self.of_stage(slot.id.stage)) > self.replicas

    def choose_stage(
        self,
        host: str = "",
        held: Collection[int] = (),
        too_large: Collection[int] = (),
        destined: int | None = None,
    ) -> int:
        """Choose the stage for a joining worker on `host`, which has the stages `held` in memory.

        A stage without replicas (serving or joining) is first. Then the stage `destined` by a move. Then a stage of `held` with fewer than
        `replicas`. Then the stage with the fewest replicas; among equals, the one with the fewest replicas on that host, because a host
        may fail as a whole, then the earliest. If all stages have `replicas`, a stage of `held` is first, and then the one with the fewest
        replicas for its load.

        Args:
            too_large: stages that do not fit into its memory. They are chosen only if no stage fits.
        """
        counts = [len(list(self.workers(stage))) for stage in range(self.num_stages)]
        extra = min(counts) >= self.replicas

        def rank(stage: int) -> tuple[bool, bool, bool, float, int]:
            stays = stage in held and (extra or counts[stage] < self.replicas)
            load = counts[stage] / self._weight(stage) if extra else counts[stage]
            return counts[stage] > 0, stage != destined, not stays, load, self.count(stage, host)

        fitting = [stage for stage in range(self.num_stages) if stage not in too_large]
        return min(fitting or range(self.num_stages), key=rank)

    def count(self, stage: int, host: str) -> int:
        """The number of replicas of a stage on a host."""
        return sum(worker.request.host == host for worker in self.workers(stage))

    def _weight(self, stage: int) -> float:
        """The load of a stage relative to that of the most loaded one."""
        most = max(self.wanted, default=0.0)
        return max(self.wanted[stage] / most, _LEAST_WEIGHT) if most else 1.0

    @property
    def fully_replicated(self) -> bool:
        """Whether every stage has at least `replicas` ready replicas, and no worker is joining or draining."""
        settled = all(slot.ready or slot.free for slot in self.slots.values())
        return settled and all(len(self.ready(stage)) >= self.replicas for stage in range(self.num_stages))

    def empty_stages(self) -> list[int]:
        """The stages without a ready or joining worker."""
        return [stage for stage in range(self.num_stages) if next(self.workers(stage), None) is None]

    def next_generation(self, world_name: str) -> int:
        """The generation of a world that is about to form. Starts at 1."""
        self._generations[world_name] += 1
        return self._generations[world_name]
