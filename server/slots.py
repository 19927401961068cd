"""Which worker serves which stage: slots, and the choice of one for a newcomer. Pure."""

from dataclasses import dataclass, field

from server.link import Link
from server.predictor import FailureSnapshot


@dataclass(slots=True)
class Slot:
    """A place for one replica of one stage. It outlives the workers in it, and gives metrics a label that does not grow."""

    stage: int
    index: int
    epoch: int = 0
    link: Link | None = None
    last_failure: FailureSnapshot | None = None
    broken_at_s: float | None = None
    """When the replica that served here last was lost, until another serves."""

    @property
    def free(self) -> bool:
        return self.link is None or self.link.state == "broken"


@dataclass(slots=True)
class Slots:
    """All slots. There are `replicas` of each stage from the start; further workers make further slots."""

    num_stages: int
    replicas: int
    all: list[Slot] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all = [Slot(stage, index) for stage in range(self.num_stages) for index in range(self.replicas)]

    def of_stage(self, stage: int) -> list[Slot]:
        return [slot for slot in self.all if slot.stage == stage]

    def choose(self) -> Slot:
        """A free slot of the stage that has fewest replicas serving or on their way; the earliest stage among equals."""
        stage = min(range(self.num_stages), key=lambda stage: sum(not slot.free for slot in self.of_stage(stage)))
        for slot in self.of_stage(stage):
            if slot.free:
                return slot
        slot = Slot(stage, len(self.of_stage(stage)))
        self.all.append(slot)
        return slot

    def former_self(self, worker: str) -> Link | None:
        """The live link of a worker of that name, which is asking again and so has lost it."""
        for slot in self.all:
            if slot.link is not None and not slot.free and slot.link.worker == worker:
                return slot.link
        return None
