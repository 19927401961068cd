"""What the scheduler is told, and the identifiers that it knows things by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

RequestId: TypeAlias = int
"""One image, which is one row of a batch. Chosen by the shell; not used again while the request is open."""

BatchId: TypeAlias = int
"""Requests that travel together. Chosen by the scheduler; never used twice."""

LinkId: TypeAlias = str
"""The leader's end of one world. Names one incarnation (the world's name with its epoch), so it never comes back."""


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request wants an answer by `deadline_s`, on the clock of `now_s`."""

    request: RequestId
    deadline_s: float


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """Nobody waits for this request any more; it is neither answered nor refused."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class LinkReady:
    """A worker has passed its canary and serves `stage` of the model of this `version`."""

    link: LinkId
    stage: int
    version: str


@dataclass(frozen=True, slots=True)
class LinkDraining:
    """The worker is leaving: it gets no new batch, what it has in flight finishes, then comes `CloseLink`."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class LinkBroken:
    """The world is gone (`cause` as multiworld says it: exit, hang, transport, left, timeout, aborted)."""

    link: LinkId
    cause: str


@dataclass(frozen=True, slots=True)
class BatchDone:
    """The worker answered. The shell holds the output until the actions returned say what becomes of it."""

    batch: BatchId
    link: LinkId
    computed_s: float | None = None
    """How long the worker computed; None where that is not known."""
    transfer_s: float | None = None
    """How long batch and output were on their ways; None where that is not known."""


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """The stage raised on this batch; the worker lives and goes on."""

    batch: BatchId
    link: LinkId
    error: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: `next_wakeup_s()` has come."""


@dataclass(frozen=True, slots=True)
class Drain:
    """The server is stopping: finish what is there, without waiting for batches to fill."""

    admits: bool = False
    """Whether newcomers are still accepted: those that had begun before. Otherwise they are refused."""


Event: TypeAlias = (
    RequestArrived | RequestCancelled | LinkReady | LinkDraining | LinkBroken | BatchDone | BatchFailed | Tick | Drain
)
