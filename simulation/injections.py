"""What chance has decided in a run, written down: enough to play the run again, whole or in part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from simulation.scenario import Fate, Fault


@dataclass(frozen=True, slots=True)
class Arrival:
    """A client asks."""

    at_s: float
    request: int
    timeout_s: float
    fate: Fate = "answer"
    cancel_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """A worker that was not there before joins."""

    at_s: float
    worker: str
    stage: int


@dataclass(frozen=True, slots=True)
class Strike:
    """A misfortune; `worker` is whom it hits, if it hits somebody. It passes without effect where the scenario's
    promise does not cover it."""

    at_s: float
    fault: Fault
    worker: str
    salt: int = 0
    """Seeds what else about it is left to chance: how long, how slow, what garbage."""
    down_s: float | None = None
    """Of a kill: until the worker serves again, if that is not left to chance."""


Injection: TypeAlias = Arrival | Start | Strike


@dataclass(frozen=True, slots=True)
class Recording:
    """The injections of a run, in order of time, and when the load ended (or the run failed)."""

    injections: tuple[Injection, ...]
    ended_s: float
