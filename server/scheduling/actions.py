"""What the scheduler asks the shell to do, in the order in which it is to be done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from server.scheduling.events import BatchId, LinkId, RequestId

SendKind: TypeAlias = Literal["first", "reroute", "retry", "hedge"]
"""first: new at this stage; reroute: its link broke or left; retry: the stage raised; hedge: a second copy of a late one."""

Reason: TypeAlias = Literal["overloaded", "deadline", "no_replica", "not_ready", "draining", "poison", "stage_error"]


class Refusal(NamedTuple):
    """Why a request gets no answer: `reason` is for machines, `detail` for people."""

    reason: Reason
    detail: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class SendBatch:
    """Send this batch's input of `stage` over `link`.

    Stage 0 and kind "first": stack the images of `requests`, in this order, and keep the result as the batch's input.
    In every other case send what is kept for the batch. What is kept stays until `KeepOutput` or `ForgetBatch`.
    """

    batch: BatchId
    stage: int
    link: LinkId
    requests: tuple[RequestId, ...]
    """Rows in order, fixed for the life of the batch: also those that nobody waits for any more."""
    version: str
    kind: SendKind
    attempt: int
    """1 + how many times work on this batch, or on the one that it was split from, had to be sent again before."""
    isolated: bool
    """One suspect request, alone on its link."""
    waited_s: float
    """Since it could have gone: the oldest request's arrival, the previous stage's answer, the break of its link or
    the failure; for a hedge since the first copy went out."""


@dataclass(frozen=True, slots=True)
class KeepOutput:
    """What `link` has just answered is the batch's input of `stage` from now on; free the input kept until now.

    A `BatchDone` that yields neither `KeepOutput` nor `Answer` for its batch came too late: drop its output.
    """

    batch: BatchId
    link: LinkId
    stage: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The last stage is done: what `link` has just answered holds the answers of these requests."""

    batch: BatchId
    link: LinkId
    rows: tuple[tuple[RequestId, int], ...]
    """(request, row of the output), those that still want an answer."""
    version: str
    path: tuple[LinkId, ...]
    """The link that did the work of each stage."""
    attempts: int
    """1 + how many times work had to be sent again on the way (hedges not counted)."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """This request gets no answer; `reason` is for machines, `detail` for people."""

    request: RequestId
    reason: Reason
    retry_after_s: float | None
    detail: str


@dataclass(frozen=True, slots=True)
class BreakLink:
    """Break this world. The scheduler has already written it off; the `LinkBroken` that follows changes nothing.

    The cause is "hang" for a link that is silent, "error" for one where batches fail that succeed elsewhere.
    """

    link: LinkId
    cause: str


@dataclass(frozen=True, slots=True)
class CloseLink:
    """A draining link has nothing in flight any more: say goodbye and close its world."""

    link: LinkId


@dataclass(frozen=True, slots=True)
class ForgetBatch:
    """Free whatever is kept for this batch. Comes once for every batch and is the last word about it."""

    batch: BatchId


Action: TypeAlias = SendBatch | KeepOutput | Answer | Refuse | BreakLink | CloseLink | ForgetBatch
