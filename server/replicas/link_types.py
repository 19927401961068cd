"""The slot and the errors of a worker's link."""

from dataclasses import dataclass


class SelfTestError(Exception):
    """The worker's output differs from the reference, or the worker cannot load the stage."""


class LinkEndedError(Exception):
    """The link ended, or its worker is draining, before the operation was done."""


class AssignmentRefusedError(LinkEndedError):
    """The worker obeys another leader, which has not assigned this stage. The link drains: the worker joins again."""


@dataclass(frozen=True, slots=True)
class SlotId:
    """A slot: the named place of a worker, for a replica of a stage or for a spare (stage None)."""

    stage: int | None
    index: int

    @property
    def name(self) -> str:
        """The name of the world: "s0.r1" or "spare0"."""
        return f"spare{self.index}" if self.stage is None else f"s{self.stage}.r{self.index}"
