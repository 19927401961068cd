"""The slots of the stages and of spares, and the slot of a joining worker. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count

from multiworld import Cause
from multiworld_serving.common.service.snapshots import FailureSnapshot
from multiworld_serving.server.leader.replicas.worker import SlotId, Worker

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
class _Slots:
    """The slots of one stage, or those of spares.

    Attributes:
        by_index: all of them.
        free: indexes of those without a connected worker.
        gaps: indexes that are below the highest one and have no slot.
        places: the number of connected workers on each host and each GPU, see `JoinRequest.places`.
    """

    by_index: dict[int, Slot] = field(default_factory=dict)
    free: set[int] = field(default_factory=set)
    gaps: set[int] = field(default_factory=set)
    places: Counter[str] = field(default_factory=Counter)

    @property
    def num_workers(self) -> int:
        return len(self.by_index) - len(self.free)

    def add(self, slot: SlotId) -> Slot:
        added = self.by_index[slot.index] = Slot(slot)
        self.free.add(slot.index)
        self.gaps.discard(slot.index)
        return added

    def leave(self, worker: Worker) -> None:
        for place in {*worker.request.places}:
            self.places[place] -= 1
            if not self.places[place]:  # names of hosts may be used once only
                del self.places[place]

    def remove(self, slot: SlotId) -> None:
        del self.by_index[slot.index]
        self.free.discard(slot.index)
        self.gaps.add(slot.index)


class Placement:
    """All slots.

    Each stage has as many slots as `replicas` says from the start. Then `spares_wanted` workers become spares. Further workers get extra
    slots, which are removed when they leave. What a joining worker needs to know takes time independent of the number of workers.

    Attributes:
        wanted: replicas of each stage that the load needs; empty: unknown. Only their ratio matters, because a leader knows its own load.
    """

    def __init__(self, replicas: Sequence[int], spares_wanted: int = 0) -> None:
        self.num_stages = num_stages = len(replicas)
        self.replicas = replicas
        self.spares_wanted = spares_wanted
        self.wanted: tuple[float, ...] = ()
        self._stages: dict[int | None, _Slots] = {stage: _Slots() for stage in (*range(num_stages), None)}
        """The slots of the stages, and those of connected spares."""
        self._live: dict[str, Worker] = {}
        """The connected workers by name."""
        self._worlds: set[str] = set()
        """The names of their worlds."""
        self._generations: Counter[str] = Counter()
        for stage in range(num_stages):
            for index in range(replicas[stage]):
                self._stages[stage].add(SlotId(stage, index))

    @property
    def slots(self) -> list[Slot]:
        """All slots, including those of spares."""
        return [slot for stage in self._stages.values() for slot in stage.by_index.values()]

    def of_stage(self, stage: int | None) -> list[Slot]:
        """The slots of a stage in their order; None: of spares."""
        return [slot for _, slot in sorted(self._stages[stage].by_index.items())]

    def workers(self, stage: int | None = None) -> Iterator[Worker]:
        """All connected workers, including spares; of one stage if one is given."""
        for slots in self._stages.values() if stage is None else (self._stages[stage],):
            for slot in slots.by_index.values():
                if slot.worker is not None and not slot.free:
                    yield slot.worker

    def ready(self, stage: int | None = None) -> list[Worker]:
        """Those of `workers` that are ready."""
        return [worker for worker in self.workers(stage) if worker.state == "ready"]

    def num_workers(self, stage: int | None = None) -> int:
        """How many workers are connected; of one stage if one is given."""
        return len(self._live) if stage is None else self._stages[stage].num_workers

    def live_worker(self, name: str) -> Worker | None:
        """The connected worker with this name, if there is one."""
        return self._live.get(name)

    def slot_of(self, worker: Worker) -> Slot | None:
        """The slot that this worker was assigned to last, unless another worker has taken it."""
        slot = self._stages[worker.slot.stage].by_index.get(worker.slot.index)
        return slot if slot is not None and slot.worker is worker else None

    def take(self, slot: Slot, worker: Worker) -> None:
        """A worker that joins, or a spare that is promoted, takes a free slot."""
        slot.worker, worker.slot = worker, slot.id
        slots = self._stages[slot.id.stage]
        slots.free.discard(slot.id.index)
        slots.places.update({*worker.request.places})
        self._live[worker.name] = worker
        self._worlds.add(worker.id.world)

    def lose(self, worker: Worker) -> None:
        """The link of this worker has ended: its slot is free."""
        slots = self._stages[worker.slot.stage]
        slots.free.add(worker.slot.index)
        slots.leave(worker)
        self._live.pop(worker.name, None)
        self._worlds.discard(worker.id.world)

    def free_slot(self, stage: int) -> Slot:
        """A free slot of this stage for a joining worker.

        If there is none, the worker becomes a spare if spares are wanted, or else gets an extra slot of the stage.
        """
        if not self._stages[stage].free and len(self._stages[None].by_index) < self.spares_wanted:
            return self._new_slot(None)
        return self._slot_of_stage(stage)

    def slot_holding(self, held: Collection[int]) -> Slot:
        """The slot for a worker that keeps the stages that it holds, at least one: of a spare if it holds all, otherwise of the stage."""
        if len(held) == self.num_stages > 1:
            return self._new_slot(None)
        return self.free_slot(0) if self.num_stages == 1 else self._slot_of_stage(min(held))

    def _slot_of_stage(self, stage: int) -> Slot:
        slots = self._stages[stage]
        return slots.by_index[min(slots.free)] if slots.free else self._new_slot(stage)

    def _new_slot(self, stage: int | None) -> Slot:
        """An extra slot. Its name is not that of the world of a connected worker: a promoted spare keeps its world."""
        slots = self._stages[stage]
        for index in chain(sorted(slots.gaps), count(len(slots.by_index) + len(slots.gaps))):
            if (slot := SlotId(stage, index)).name not in self._worlds:
                break
            slots.gaps.add(index)
        return slots.add(slot)

    def remove(self, slot: Slot) -> None:
        """Remove a slot of a spare, or an extra one."""
        slots = self._stages[slot.id.stage]
        if slot.worker is not None and not slot.free:
            slots.leave(slot.worker)
        slots.remove(slot.id)

    def surplus(self, stage: int) -> int:
        """How many connected workers more than `replicas` a stage has; negative: how many it lacks."""
        return self.num_workers(stage) - self.replicas[stage]

    def num_extra(self, stage: int | None) -> int:
        """How many slots more than `replicas` a stage has. Spares have no slot without a worker."""
        return len(self._stages[stage].by_index) - (0 if stage is None else self.replicas[stage])

    def choose_stage(
        self,
        places: Sequence[str] = (),
        held: Collection[int] = (),
        destined: int | None = None,
    ) -> int:
        """Choose the stage for a worker that joins from a host and a GPU, `places`, and has the stages `held` in memory.

        A stage without replicas (serving or joining) is first. Then the stage `destined` by a move. Then a stage of `held` with fewer than
        `replicas`. Then the stage with the smallest part of its `replicas`; among equals, the one with the fewest replicas on that host,
        then on that GPU, because each may fail as a whole, then the earliest. If all stages have `replicas`, a stage of `held` is first,
        and then the one with the fewest replicas for its load.
        """
        counts = [self.num_workers(stage) for stage in range(self.num_stages)]
        missing = [wanted - there for wanted, there in zip(self.replicas, counts, strict=True)]
        extra, largest = max(missing) <= 0, max(self.wanted, default=0.0)
        weights = [max(wanted / largest, _LEAST_WEIGHT) for wanted in self.wanted] if largest else [1.0] * len(counts)

        def rank(stage: int) -> tuple[bool, bool, bool, float, list[int]]:
            stays = stage in held and (extra or missing[stage] > 0)
            load = counts[stage] / weights[stage] if extra else counts[stage] / self.replicas[stage]
            return counts[stage] > 0, stage != destined, not stays, load, [self.count(stage, place) for place in places]

        return min(range(self.num_stages), key=rank)

    def count(self, stage: int, place: str) -> int:
        """The number of replicas of a stage on a host or a GPU."""
        return self._stages[stage].places[place]

    @property
    def fully_replicated(self) -> bool:
        """Whether every stage has at least `replicas` ready replicas, and no worker is joining or draining."""
        settled = all(slot.ready or slot.free for slot in self.slots)
        return settled and all(len(self.ready(stage)) >= wanted for stage, wanted in enumerate(self.replicas))

    def next_generation(self, world_name: str) -> int:
        """The generation of a world that is about to form. Starts at 1."""
        self._generations[world_name] += 1
        return self._generations[world_name]
