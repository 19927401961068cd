"""Results of a request, as immutable values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Label:
    """One class and its probability, 0 to 1."""

    label: str
    class_id: int
    probability: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The result for one image."""

    labels: tuple[Label, ...]
    """The most probable classes in descending order; at least one."""
    model: str
    version: str
    """Name of the version that answered."""
    request_id: str
    """Identifies the request in the service's log. Images of one batch share it."""
    path: tuple[str, ...]
    """The world that computed each stage, in order. For a batch, that of its first image."""
    attempts: int
    """1 plus the number of times that a worker failed and the batch went to another."""
    tries: int
    """Requests that this client sent, including retries."""

    @property
    def best(self) -> Label:
        """The most probable class."""
        return self.labels[0]

    @property
    def label(self) -> str:
        """Name of the most probable class."""
        return self.best.label

    @property
    def probability(self) -> float:
        """Probability of the most probable class, 0 to 1."""
        return self.best.probability
