"""The scheduler's output: actions for the driver, to be performed in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from multiworld_serving.server.leader.scheduling.events import BatchId, ReplicaId, RequestId

SendKind: TypeAlias = Literal["first", "reroute", "retry", "hedge"]
"""first: new at this stage; reroute: the replica was lost; retry: the stage raised; hedge: a second attempt of a late batch."""

Reason: TypeAlias = Literal[
    "overloaded", "deadline", "no_replica", "not_ready", "poison", "stage_error", "invalid_input", "session_lost"
]


@dataclass(frozen=True, slots=True)
class SendBatch:
    """Send this batch's input for `stage` to `replica`, or the reference of an input that another replica keeps.

    For stage 0 and kind "first": stack the rows of `requests` in this order and store the result as the batch's input.
    Otherwise send the stored input or reference. The driver keeps it until `KeepOutput` or `FreeBatch`. An input is never sent after its
    holder was removed (`ReplicaLost`, `FailReplica`, `ReleaseReplica`).
    """

    batch: BatchId
    stage: int
    replica: ReplicaId
    requests: tuple[RequestId, ...]
    """Row order. Fixed for the life of the batch; includes requests that are already closed."""
    version: str
    kind: SendKind
    attempt: int
    """1, plus 1 for each time that this batch or its requests were rerouted, retried, isolated or requeued. Hedges do not count."""
    isolated: bool
    """The batch has suspect requests: one, or a part of a batch whose stage raised. It is alone on its replica."""
    waited_s: float
    """Time since the batch could have been sent: since the oldest request's arrival, the previous stage's output, the
    loss of its replica or the failure. For a hedge: time since the first attempt."""


@dataclass(frozen=True, slots=True)
class KeepOutput:
    """Store the output that `replica` has just returned as the batch's input for `stage`, and free the previous input.

    For an output that the replica keeps, store its reference. To free a kept input is to release it at its holder.
    If a `BatchDone` yields neither `KeepOutput` nor `Answer` for its batch, it came too late: drop its output.
    """

    batch: BatchId
    replica: ReplicaId
    stage: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The last stage is done: the output that `replica` has just returned answers these requests.

    The scheduler knows nothing about delivery: a kept output of the last stage survives the `FreeBatch` that follows.
    """

    batch: BatchId
    replica: ReplicaId
    rows: tuple[tuple[RequestId, int], ...]
    """(request, row of the output) of the requests that are still open."""
    version: str
    attempts: int
    """`SendBatch.attempt` of the last stage."""


@dataclass(frozen=True, slots=True)
class Reject:
    """End this request without an answer; `reason` is machine-readable, `detail` is for people."""

    request: RequestId
    reason: Reason
    detail: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class FailReplica:
    """Break the world of this replica. The scheduler has removed the replica already; the `ReplicaLost` that follows has no effect.

    `cause` is "hang" for a replica that did not answer within `hang_timeout_s`, "error" for one whose failed batches succeeded elsewhere.
    """

    replica: ReplicaId
    cause: str


@dataclass(frozen=True, slots=True)
class ReleaseReplica:
    """A draining replica has no batches in flight and keeps no input of a batch any more. The driver may close its world."""

    replica: ReplicaId


@dataclass(frozen=True, slots=True)
class FreeBatch:
    """Free everything that is stored for this batch, and release a kept input. Emitted exactly once per batch, as its last action."""

    batch: BatchId


Action: TypeAlias = SendBatch | KeepOutput | Answer | Reject | FailReplica | ReleaseReplica | FreeBatch
