"""What frontends and leaders say to each other: one type for each kind of message, and rows as payloads."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

from msgspec import Meta
from torch import Tensor

from multiworld_serving.common.service.administration import Desired
from multiworld_serving.common.service.errors import RequestRejected
from multiworld_serving.common.service.predictor import (
    MAX_ROW_BYTES,
    ModelVersion,
    Prediction,
    RestartStep,
    ServedModel,
    Trace,
)
from multiworld_serving.common.service.snapshots import PipelineSnapshot
from multiworld_serving.common.wire.inputs import RowsLost
from multiworld_serving.common.wire.protocol import Body, Failure, Protocol, rows_of_payload
from multiworld_serving.models.bundle.rows import RowFormat
from multiworld_serving.models.errors import BundleError, ModelError

logger = logging.getLogger(__name__)

_INTERNAL = "internal"
OperationName = Literal["load-version", "unload", "rolling-restart", "drain", "undrain"]
MAX_KEY_CHARS = 1000
_MAX_ROW = 1 << 31
_MAX_ROWS = 1 << 16
_MAX_STAGES = 1024


class Predict(Body, frozen=True):
    """Frontend to leader: a request. Reply: Prediction, RowsLost or Rejection.

    Attributes:
        timeout_s: seconds until its deadline.
        key: requests with equal keys can be computed together.
        rows: number of samples.
        tensor: id of the input that the frontend keeps, [rows, …]; None: the input is the payload.
        row_bytes: length of a row of the input, if lengths vary; otherwise 0.
        route: the replicas that keep its session; see `RequestArrived`. Empty: any replicas.
        relay: all tensors of the request pass the leader: the input is the payload, and the output that of the reply.
        traced: the reply contains a `trace`.
    """

    request_id: str
    timeout_s: float
    key: Annotated[str, Meta(max_length=MAX_KEY_CHARS)] = ""
    rows: Annotated[int, Meta(ge=1, le=_MAX_ROWS)] = 1
    tensor: int | None = None
    row_bytes: Annotated[int, Meta(ge=0, lt=_MAX_ROW)] = 0
    relay: bool = False
    traced: bool = False
    route: Annotated[tuple[str, ...], Meta(max_length=_MAX_STAGES)] = ()


class Rejection(Failure, frozen=True):
    """The reply that is an exception."""

    reason: str
    detail: str
    retry_after_s: float | None = None
    trace: Trace | None = None

    @classmethod
    def of(cls, error: Exception) -> Rejection:
        if isinstance(error, RequestRejected):
            return cls(error.reason, error.detail, error.retry_after_s, error.trace)
        if isinstance(error, ModelError):
            return cls("invalid_weights", str(error))
        logger.error("a message failed", exc_info=error)
        return cls(_INTERNAL, f"the leader failed ({type(error).__name__}); see its log")

    def error(self) -> Exception:
        if self.reason == _INTERNAL:
            return RuntimeError(self.detail)
        error = RequestRejected.for_reason(self.reason, self.detail, retry_after_s=self.retry_after_s)
        error.trace = self.trace
        return error


class AdminOperation(Body, frozen=True):
    """Frontend to the acting leader; `weights` and `revision` as for `Leader.load_version`. Replies: Steps, then Done or Rejection.

    Attributes:
        host: to drain, or to use again.
    """

    operation: OperationName
    weights: str | None = None
    revision: int = 0
    host: str = ""


class Step(Body, frozen=True):
    """A step of a rolling restart."""

    step: RestartStep


class Done(Body, frozen=True):
    """The reply that says only that it is done.

    Attributes:
        version: of "load-version".
    """

    version: ModelVersion | None = None


class Follow(Body, frozen=True):
    """Frontend to leader: what another leader serves."""

    desired: Desired


class Scrape(Body, frozen=True):
    """In both directions: reply Metrics of the receiver, and those of the leader's other frontends if `others`."""

    others: bool = False


class Metrics(Body, frozen=True):
    """Name and metrics of each process; a frontend does not name itself."""

    texts: tuple[tuple[str, str], ...]


class LeaderState(Body, frozen=True):
    """Leader to frontend, whenever it changes, and once a second. With a number: reply Done when the state is known, and no request of the
    frontend needs a leader that rejects requests.

    Attributes:
        desired, served, obstacle: see `Leader`.
        snapshot: its pipeline and its frontends, with its name as `leader`.
        model: only in the first state.
    """

    host: str
    pid: int
    desired: Desired
    served: Desired
    snapshot: PipelineSnapshot
    obstacle: str = ""
    model: ServedModel | None = None


FRONTEND_PROTOCOL = Protocol(
    LeaderState
    | Predict
    | Prediction
    | RowsLost
    | Rejection
    | AdminOperation
    | Step
    | Done
    | Follow
    | Scrape
    | Metrics,
    Rejection.of,
)
MAX_BYTES = 8 * MAX_ROW_BYTES
"""Maximum payload of one message."""


def parse_rows(payload: memoryview, count: int, rows: RowFormat) -> Tensor:
    """The rows of a payload, sharing memory with it. Raises ValueError if it is not `count` rows of this format."""
    if rows.row_shape is not None:
        return rows_of_payload(payload, count, rows.dtype, rows.row_shape)
    if not payload:
        raise ValueError(f"{count} rows have no bytes")
    found = rows_of_payload(payload, count, rows.dtype, (len(payload) // count,))
    try:
        rows.unpack(found)
    except (BundleError, RuntimeError) as error:
        raise ValueError(str(error)) from error
    return found
