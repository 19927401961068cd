"""What a service answers, as values that do not change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Label:
    """One class, and how probable it is."""

    label: str
    class_id: int
    probability: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the service says of one picture."""

    labels: tuple[Label, ...]
    """The most probable classes, the best first; at least one."""
    model: str
    version: str
    """Which weights answered."""
    request_id: str
    """Finds the request in the service's log. Pictures that were sent together share it."""
    path: tuple[str, ...]
    """The world that answered for each stage, in order. Of pictures that were sent together, that of the first."""
    attempts: int
    """How often a batch with the picture was sent to a worker; more than the number of stages when a failure was survived."""
    tries: int
    """How often this client has asked: more than 1 when it was refused, or the connection broke."""

    @property
    def best(self) -> Label:
        """The most probable class."""
        return self.labels[0]

    @property
    def label(self) -> str:
        """The most probable class, in words."""
        return self.best.label

    @property
    def probability(self) -> float:
        """How probable that one is, 0 to 1."""
        return self.best.probability
