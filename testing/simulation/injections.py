"""The recorded external inputs of a run: enough to replay the whole run or a part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from multiworld_serving.testing.simulation.scenario import ComputeOutcome, Fault


@dataclass(frozen=True, slots=True)
class Arrival:
    """A client sends a request."""

    at_s: float
    request: int
    timeout_s: float
    compute_outcome: ComputeOutcome = "answer"
    cancel_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """A new worker joins."""

    at_s: float
    worker: str
    stage: int


@dataclass(frozen=True, slots=True)
class FaultInjected:
    """A fault at `worker`. It has no effect where the scenario does not allow the resulting refusals."""

    at_s: float
    fault: Fault
    worker: str
    salt: int = 0
    """Seed of the random parameters of the fault: duration, slowdown, invalid event."""
    down_s: float | None = None
    """For a kill: time until the worker serves again; None draws it at random."""


Injection: TypeAlias = Arrival | Start | FaultInjected


@dataclass(frozen=True, slots=True)
class Recording:
    """The injections of a run in order of time, and the time at which the load ended or the run failed."""

    injections: tuple[Injection, ...]
    ended_s: float
