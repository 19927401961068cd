"""The record of a worker that has joined, what is in flight there, and the ids of workers and replicas. No I/O."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from multiworld_serving.common.service.predictor import StageAttempt
from multiworld_serving.common.service.snapshots import ReplicaState
from multiworld_serving.common.wire.join import JoinRequest
from multiworld_serving.server.leader.scheduling.events import ReplicaId


@dataclass(frozen=True, slots=True)
class SlotId:
    """A slot: the named place of a worker, for a replica of a stage or for a spare (stage None)."""

    stage: int | None
    index: int

    @property
    def name(self) -> str:
        """The name of the world: "s0.r1" or "spare0"."""
        return f"spare{self.index}" if self.stage is None else f"s{self.stage}.r{self.index}"


class LinkId(NamedTuple):
    """One world in one generation. Never reused."""

    world: str
    generation: int

    def __str__(self) -> str:
        return f"{self.world}#{self.generation}"


class Ending(NamedTuple):
    """Why a link ended.

    Attributes:
        silent_s: seconds since the worker was last heard from.
        leader_unresponsive: whether the leader failed, not the worker, for example because the worker reported missed heartbeats.
    """

    cause: str
    detail: str
    silent_s: float | None = None
    leader_unresponsive: bool = False


@dataclass(eq=False)
class Worker:
    """A worker that has joined this leader. The record ends with its link; a worker that joins again has a new one.

    Attributes:
        request: name, host, device and edge of the worker.
        slot: its place. Updated when a spare is promoted.
        id: world name and generation.
        state: as `ReplicaState`. A spare is "ready" too. "draining": it gets no new batches.
        since_s: when `state` changed last, as `time.monotonic()`.
        ready_at_s: when it first was "ready".
        loaded: numbers of the versions that the worker has loaded and that passed the self-test.
        replicas: its replicas at the scheduler, by version; the value says whether they still get new batches.
        busy_with: the version that it is loading while it serves; "restart" or "close" if its link is about to end.
        ending: set once `state` is "broken".
    """

    request: JoinRequest
    slot: SlotId
    generation: int
    state: ReplicaState = "joining"
    since_s: float = field(default_factory=time.monotonic)
    ready_at_s: float | None = None
    batches_done: int = 0
    loaded: set[int] = field(default_factory=set)
    replicas: dict[int, bool] = field(default_factory=dict)
    busy_with: int | str | None = None
    ending: Ending | None = None

    def __post_init__(self) -> None:
        self.id = LinkId(self.slot.name, self.generation)

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.request.worker

    @property
    def stage(self) -> int:
        """The stage that it serves. Must not be called for a spare."""
        assert self.slot.stage is not None, "a spare serves no stage"
        return self.slot.stage

    def replica(self, version: int) -> ReplicaId:
        """The scheduler's id of this worker's replica of a version. A worker that serves two versions is two replicas."""
        return f"{self.id}@{version}"


@dataclass(slots=True)
class SentBatch:
    """A batch in flight at a worker.

    Attributes:
        requests: the scheduler's id of each row.
        request_ids: the ids of its requests, separated by commas, for the log.
        attempt: for traces; None = none of its requests is traced.
    """

    batch: int
    stage: int
    version: int
    requests: tuple[int, ...]
    replica: ReplicaId
    sent_s: float
    request_ids: str = ""
    attempt: StageAttempt | None = None

    def end(self, error: str = "", compute_s: float = 0.0, transfer_s: float = 0.0) -> None:
        """The result has come, or the worker was lost."""
        if (attempt := self.attempt) is not None:
            attempt.ended_s, attempt.error = time.monotonic(), error
            attempt.compute_s, attempt.transfer_s = compute_s, transfer_s


class SelfTestError(Exception):
    """The worker's output differs from the reference, or the worker cannot load the stage."""


class LinkEndedError(Exception):
    """The link ended, or its worker is draining, before the operation was done."""
