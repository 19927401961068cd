"""What frames between frontends and leaders say: one type for the body of each kind of frame, and rows as payloads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from multiworld_serving.common.wire import EdgeStates
from multiworld_serving.models.bundle.rows import RowFormat
from multiworld_serving.models.errors import BundleError
from multiworld_serving.server.administration import Desired
from multiworld_serving.server.errors import InputUnreachableError, RequestRejected
from multiworld_serving.server.predictor import KeptRows, ModelVersion, Prediction
from multiworld_serving.server.snapshots import PipelineSnapshot

_INTERNAL = "internal"
_RELAY = "relay"
OperationName = Literal["load-version", "unload", "rolling-restart"]
MAX_KEY_CHARS = 1000
_MAX_ROW = 1 << 31
_MAX_ROWS = 1 << 16


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a frame whose kind says everything."""


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Would a request be rejected?

    Attributes:
        ahead: other requests that the frontend prepares.
    """

    ahead: Annotated[int, Meta(ge=0)]
    timeout_s: float


class Predict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request.

    Attributes:
        timeout_s: seconds until its deadline.
        span: trace id and span id of the request in hexadecimal digits; None: it is not traced.
        key: requests with equal keys can be computed together.
        rows: number of samples.
        tensor: id of the input that the frontend keeps, [rows, …]; None: the input is the payload.
        row_bytes: length of a row of the input, if lengths vary; otherwise 0.
        fetches: whether the frontend can fetch the answer.
        unreachable: a worker from which the frontend could not fetch the last answer.
    """

    request_id: str
    timeout_s: float
    span: tuple[str, str] | None = None
    key: Annotated[str, Meta(max_length=MAX_KEY_CHARS)] = ""
    rows: Annotated[int, Meta(ge=1, le=_MAX_ROWS)] = 1
    tensor: int | None = None
    row_bytes: Annotated[int, Meta(ge=0, lt=_MAX_ROW)] = 0
    fetches: bool = False
    unreachable: str | None = None


class PredictReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `Prediction` without its output, whose rows are the payload, or stay at the workers that `kept` names."""

    model: str
    version: str
    queue_s: float
    compute_s: float
    transfer_s: float
    attempts: int
    path: tuple[str, ...]
    batch_size: int
    version_number: int
    kept: tuple[KeptRows, ...]

    @classmethod
    def of(cls, prediction: Prediction) -> PredictReply:
        return cls(*(getattr(prediction, field) for field in cls.__struct_fields__))

    def prediction(self, output: Tensor) -> Prediction:
        """The prediction with this output."""
        fields = {field: getattr(self, field) for field in self.__struct_fields__}
        return Prediction(output, **{**fields, "kept": ()})

    def check_kept(self, rows: RowFormat, count: int) -> None:
        """Raise ValueError unless rows of these shapes can be in an output of `count` rows, each once."""
        for kept in self.kept:
            if kept.shape != rows.row_shape and (rows.row_shape is not None or len(kept.shape) != 1):
                raise ValueError(f"an output of the shape {kept.shape!s:.100}; expected {rows.row_shape or '(bytes,)'}")
            if len(kept.rows) != len(kept.at):
                raise ValueError(f"{len(kept.rows)} rows of an output for {len(kept.at)} samples")
        found = [at for kept in self.kept for at in kept.at]
        if len(set(found)) < len(found) or any(not 0 <= at < count for at in found):
            raise ValueError(f"outputs of the samples {found!s:.100}; expected each of {count} at most once")


class Rejection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a request got no answer."""

    reason: str
    detail: str
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: RequestRejected | InputUnreachableError | None) -> Rejection:
        """None: an unexpected exception."""
        if error is None:
            return cls(_INTERNAL, "the leader failed on this request; see its log")
        if isinstance(error, InputUnreachableError):
            return cls(_RELAY, str(error))
        return cls(error.reason, error.detail, error.retry_after_s)

    def error(self) -> Exception:
        """The exception of which this is."""
        if self.reason == _INTERNAL:
            return RuntimeError(self.detail)
        if self.reason == _RELAY:
            return InputUnreachableError(self.detail)
        return RequestRejected.for_reason(self.reason, self.detail, retry_after_s=self.retry_after_s)


class Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An administrative operation for the acting leader; `weights` and `revision` as for `Leader.load_version`."""

    operation: OperationName
    weights: str | None = None
    revision: int = 0


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a request for which there is no other reply.

    Attributes:
        version: of "load-version".
        error, kind: what failed, and the name of the error in `OPERATION_ERRORS`.
    """

    version: ModelVersion | None = None
    error: str | None = None
    kind: str = ""


class Scrape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The receiver's metrics are needed, and those of the leader's other frontends if `others`."""

    others: bool = False


class Metrics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metrics as text in the payload: name of the process and bytes of its text."""

    texts: tuple[tuple[str, int], ...]


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frontend's connections, requests in flight, and the edges on which it fetches."""

    connections: int
    requests: int
    edges: EdgeStates


@dataclass(frozen=True)
class LeaderState:
    """What a leader tells its frontends whenever it changes, and once a second.

    Attributes:
        desired, served, obstacle: see `Leader`.
        rejection: why it rejects all requests (draining, or unloaded); None if it does not.
        snapshot: its pipeline and its frontends.
    """

    leader: str
    host: str
    pid: int
    version: ModelVersion
    desired: Desired
    served: Desired
    ready: bool
    rejection: Rejection | None
    snapshot: PipelineSnapshot
    obstacle: str = ""


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
