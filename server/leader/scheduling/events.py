"""The scheduler's input: events, and the ids of requests, batches and replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

RequestId: TypeAlias = int
"""One sample, which is one row of a batch. Chosen by the driver; unique among the open requests."""

BatchId: TypeAlias = int
"""Requests that are sent together. Chosen by the scheduler; never reused."""

ReplicaId: TypeAlias = str
"""One worker link that serves one stage of a version. Chosen by the driver; never reused."""


class RequestArrived(NamedTuple):
    """Samples of a client's request need answers by `deadline_s`, on the clock of `now_s`. They are accepted or rejected together."""

    request: RequestId
    deadline_s: float
    key: str = ""
    """Only requests with equal keys share a batch: their rows have equal shapes."""
    rows: int = 1
    """Number of samples. Their ids begin with `request`. If they are rejected, this id is."""
    route: tuple[ReplicaId, ...] = ()
    """The replica of each stage that keeps the session of the request: no other one can compute it. If only the
    last stages keep it, the request begins at the first of them. Empty: any replicas."""


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client no longer waits for this request. The scheduler neither answers nor rejects it."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class ReplicaReady:
    """A worker has passed the self-test for `stage` of model version `version` and accepts batches."""

    replica: ReplicaId
    stage: int
    version: str
    """Identifies a version of the model that is cut into stages in one way."""


@dataclass(frozen=True, slots=True)
class ReplicaDraining:
    """The replica accepts no new batches. Batches in flight finish; the action `ReleaseReplica` follows."""

    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """The link of this replica has ended. `cause` is a value of `multiworld.Cause`."""

    replica: ReplicaId
    cause: str


@dataclass(frozen=True, slots=True)
class BatchDone:
    """The worker has computed the output. The driver holds it, or its reference, until it has performed the actions for this event."""

    batch: BatchId
    replica: ReplicaId
    computed_s: float | None = None
    """Compute time at the worker; None if unknown."""
    transfer_s: float | None = None
    """Transfer time of input and output together; None if unknown."""
    kept: bool = False
    """The output stays at the replica until the driver releases it, and is lost with the replica. False: it came with the message."""


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """The stage raised an exception on this batch, or the worker could not get the input. The worker still runs.

    If it could not get the input, the driver has cancelled all requests of the batch before this event.
    """

    batch: BatchId
    replica: ReplicaId
    error: str
    sent: bool = True
    """False if the driver failed to send the batch. This is not a failure of the replica, and a retry elsewhere would not help."""
    by_input: bool = False
    """The model does not take the input: another replica would raise too."""


@dataclass(frozen=True, slots=True)
class Tick:
    """The time returned by `next_wakeup_s()` has come."""


@dataclass(frozen=True, slots=True)
class Drain:
    """The server is stopping: do not wait for batches to fill. Requests that the server had begun to read may still arrive."""


Event: TypeAlias = (
    RequestArrived
    | RequestCancelled
    | ReplicaReady
    | ReplicaDraining
    | ReplicaLost
    | BatchDone
    | BatchFailed
    | Tick
    | Drain
)
Events: TypeAlias = Event | list[RequestArrived]
"""One event, or requests that arrive together."""
