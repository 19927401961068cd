"""What frontends and leaders say to each other: one type for each kind of message, and rows as payloads."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from multiworld_serving.models.bundle.rows import RowFormat
from multiworld_serving.models.errors import BundleError, ModelError
from multiworld_serving.server.administration import Desired
from multiworld_serving.server.errors import RequestRejected
from multiworld_serving.server.predictor import ModelVersion, Prediction, RestartStep, ServedModel
from multiworld_serving.server.snapshots import PipelineSnapshot

_INTERNAL = "internal"
OperationName = Literal["load-version", "unload", "rolling-restart"]
MAX_KEY_CHARS = 1000
_MAX_ROW = 1 << 31
_MAX_ROWS = 1 << 16


class Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The body of a message. Its class is the tag `type`."""


class Predict(Body, frozen=True):
    """Frontend to leader: a request. Reply: Prediction or Rejection.

    Attributes:
        timeout_s: seconds until its deadline.
        key: requests with equal keys can be computed together.
        rows: number of samples.
        tensor: id of the input that the frontend keeps, [rows, …]; None: the input is the payload.
        row_bytes: length of a row of the input, if lengths vary; otherwise 0.
        fetches: whether the frontend can fetch the answer.
        unreachable: a worker from which the frontend could not fetch the last answer.
    """

    request_id: str
    timeout_s: float
    key: Annotated[str, Meta(max_length=MAX_KEY_CHARS)] = ""
    rows: Annotated[int, Meta(ge=1, le=_MAX_ROWS)] = 1
    tensor: int | None = None
    row_bytes: Annotated[int, Meta(ge=0, lt=_MAX_ROW)] = 0
    fetches: bool = False
    unreachable: str | None = None


class Rejection(Body, frozen=True):
    """The reply that is an exception."""

    reason: str
    detail: str
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: Exception) -> Rejection:
        if isinstance(error, RequestRejected):
            return cls(error.reason, error.detail, error.retry_after_s)
        if isinstance(error, ModelError):
            return cls("invalid_weights", str(error))
        return cls(_INTERNAL, f"the leader failed ({type(error).__name__}); see its log")

    @property
    def is_internal(self) -> bool:
        """Whether it is an unexpected exception."""
        return self.reason == _INTERNAL

    def error(self) -> Exception:
        """The exception."""
        if self.is_internal:
            return RuntimeError(self.detail)
        return RequestRejected.for_reason(self.reason, self.detail, retry_after_s=self.retry_after_s)


class Operation(Body, frozen=True):
    """Frontend to the acting leader; `weights` and `revision` as for `Leader.load_version`. Replies: Steps, then Done or Rejection."""

    operation: OperationName
    weights: str | None = None
    revision: int = 0


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


AnyBody = LeaderState | Predict | Prediction | Rejection | Operation | Step | Done | Follow | Scrape | Metrics


def rows_payload(rows: Tensor) -> memoryview:
    """The bytes of rows [N, …]."""
    return rows.contiguous().view(-1).view(torch.uint8).numpy().data


def parse_rows(payload: memoryview, count: int, rows: RowFormat) -> Tensor:
    """The inverse of `rows_payload`, sharing memory with `payload`. Raises ValueError if it is not `count` rows of this format."""
    shape = rows.row_shape
    if shape is None:
        if not payload or len(payload) % count:
            raise ValueError(f"{count} rows have {len(payload)} bytes")
        found = torch.frombuffer(payload, dtype=torch.uint8).view(count, -1)
        try:
            rows.unpack(found)
        except (BundleError, RuntimeError) as error:
            raise ValueError(str(error)) from error
        return found
    expected = count * math.prod(shape) * rows.dtype.itemsize
    if len(payload) != expected:
        raise ValueError(f"{count} rows have {len(payload)} bytes; expected {expected}")
    if not expected:
        return torch.empty((count, *shape), dtype=rows.dtype)
    return torch.frombuffer(payload, dtype=rows.dtype).view(count, *shape)
