"""Converts predictions, rows, errors and states to the fields and payloads of frames, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from multiworld_serving.common.wire import different_fields
from multiworld_serving.models.bundle.manifest import TensorSpec
from multiworld_serving.models.bundle.rows import RowFormat
from multiworld_serving.models.errors import BundleError
from multiworld_serving.server.errors import InputUnreachableError, RequestRejected
from multiworld_serving.server.predictor import ImageSizes, KeptRow, ModelVersion, Prediction, ServedModel
from multiworld_serving.server.snapshots import (
    EdgeSnapshot,
    FailureSnapshot,
    FrontendSnapshot,
    LeaderSnapshot,
    PipelineSnapshot,
    ReplicaSnapshot,
    RolloutProgress,
    StageSnapshot,
)

_INTERNAL = "internal"
_RELAY = "relay"
MAX_KEY_CHARS = 1000


def prediction_fields(prediction: Prediction) -> dict[str, Any]:
    """A prediction without its output."""
    return {name: value for name, value in vars(prediction).items() if name != "output"}


def parse_kept(fields: Mapping[str, Any], rows: RowFormat) -> KeptRow | None:
    """Where the output of a PREDICTION frame is. Raises TypeError or ValueError if the field is invalid."""
    kept = fields["kept"]
    if kept is None:
        return None
    holder, tensor, row, shape = kept
    found = KeptRow(str(holder), int(tensor), int(row), tuple(map(int, shape)))
    if found.shape != rows.row_shape and (rows.row_shape is not None or len(found.shape) != 1):
        raise ValueError(f"an output of the shape {found.shape!s:.100}; expected {rows.row_shape or '(bytes,)'}")
    return found


def parse_prediction(fields: Mapping[str, Any], output: Tensor) -> Prediction:
    """The inverse of `prediction_fields`, with the output of the payload or of the worker that keeps it."""
    return Prediction(**{**fields, "path": tuple(fields["path"]), "kept": None}, output=output)


def row_payload(row: Tensor) -> memoryview:
    """The bytes of a row."""
    return row.contiguous().view(-1).view(torch.uint8).numpy().data


def parse_row(payload: memoryview, rows: RowFormat) -> Tensor:
    """The inverse of `row_payload`, sharing memory with `payload`. Raises ValueError if it is not a row of this format."""
    shape = rows.row_shape
    if shape is None:
        row = torch.frombuffer(payload, dtype=torch.uint8) if len(payload) else torch.empty(0, dtype=torch.uint8)
        try:
            rows.unpack(row[None])
        except (BundleError, RuntimeError) as error:
            raise ValueError(str(error)) from error
        return row
    expected = math.prod(shape) * rows.dtype.itemsize
    if len(payload) != expected:
        raise ValueError(f"the row has {len(payload)} bytes; expected {expected}")
    return torch.frombuffer(payload, dtype=rows.dtype).view(shape) if expected else torch.empty(shape, dtype=rows.dtype)


def rejection_fields(rejection: RequestRejected | InputUnreachableError | None) -> dict[str, Any]:
    """An error; None = an unexpected exception."""
    if rejection is None:
        return {"reason": _INTERNAL, "detail": "the leader failed on this request; see its log"}
    if isinstance(rejection, InputUnreachableError):
        return {"reason": _RELAY, "detail": str(rejection)}
    return {"reason": rejection.reason, "detail": rejection.detail, "retry_after_s": rejection.retry_after_s}


def parse_rejection(fields: Mapping[str, Any]) -> Exception:
    """The inverse of `rejection_fields`."""
    if fields["reason"] == _INTERNAL:
        return RuntimeError(fields["detail"])
    if fields["reason"] == _RELAY:
        return InputUnreachableError(fields["detail"])
    return RequestRejected.for_reason(fields["reason"], fields["detail"], retry_after_s=fields["retry_after_s"])


@dataclass(frozen=True)
class LeaderState:
    """What a leader tells its frontends whenever it changes, and once a second.

    Attributes:
        weights: with which the version was loaded; None = the configured weights.
        revision: of the operation that loaded the version; 0 = the configured version.
        rejection: why it rejects all requests (draining, or unloaded); None if it does not.
        snapshot: its pipeline and its frontends.
    """

    leader: str
    host: str
    pid: int
    version: ModelVersion
    weights: str | None
    revision: int
    ready: bool
    rejection: Mapping[str, Any] | None
    snapshot: PipelineSnapshot

    def fields(self) -> dict[str, Any]:
        """The fields of a STATE frame."""
        return asdict(self) | {"version": list(self.version)}

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> LeaderState:
        """The inverse of `fields`. Raises KeyError, TypeError or ValueError if they are invalid."""
        _require_fields(cls, "STATE", found=fields)
        _require_fields(PipelineSnapshot, "the snapshot in STATE", found=fields["snapshot"])
        return cls(
            **{
                **fields,
                "version": ModelVersion(*fields["version"]),
                "snapshot": _parse_snapshot(fields["snapshot"]),
            }
        )


def _require_fields(cls: type[Any], what: str, *, found: object) -> None:
    """Raise ValueError unless `found` is an object with the fields of `cls`."""
    if not isinstance(found, Mapping):
        raise ValueError(f"{what} is not an object")  # noqa: TRY004 - invalid data, not a wrong call
    expected = [field.name for field in dataclasses.fields(cls)]
    if found.keys() != set(expected):
        raise ValueError(f"{what}: {different_fields(found, expected)}; do both sides run the same release?")


def _parse_snapshot(fields: Mapping[str, Any]) -> PipelineSnapshot:
    return PipelineSnapshot(
        **{
            **{name: value for name, value in fields.items() if name not in ("state", "reasons")},
            "stages": tuple(
                StageSnapshot(
                    stage["index"],
                    tuple(stage["blocks"]),
                    tuple(map(_parse_replica, stage["replicas"])),
                    stage["rerouted"],
                )
                for stage in fields["stages"]
            ),
            "spares": tuple(map(_parse_replica, fields["spares"])),
            "leaders": tuple(LeaderSnapshot(**leader) for leader in fields["leaders"]),
            "frontends": tuple(FrontendSnapshot(**frontend) for frontend in fields["frontends"]),
            "edges": tuple(EdgeSnapshot(**edge) for edge in fields["edges"]),
            "rollout": _parse_rollout(fields["rollout"]),
        }
    )


def _parse_rollout(fields: Mapping[str, Any] | None) -> RolloutProgress | None:
    return None if fields is None else RolloutProgress(**{**fields, "passed": tuple(fields["passed"])})


def _parse_replica(fields: Mapping[str, Any]) -> ReplicaSnapshot:
    failure = fields["last_failure"]
    return ReplicaSnapshot(**{**fields, "last_failure": failure and FailureSnapshot(**failure)})


def model_fields(model: ServedModel) -> dict[str, Any]:
    """The fields of a WELCOME frame."""
    return asdict(model)


def parse_model(fields: Mapping[str, Any]) -> ServedModel:
    """The inverse of `model_fields`. Raises KeyError, TypeError or ValueError if they are invalid."""
    _require_fields(ServedModel, "WELCOME", found=fields)
    try:
        return ServedModel(
            **{
                **fields,
                "inputs": tuple(map(_parse_tensor, fields["inputs"])),
                "outputs": tuple(map(_parse_tensor, fields["outputs"])),
                "dimensions": {name: (int(least), int(most)) for name, (least, most) in fields["dimensions"].items()},
                "image": fields["image"] and ImageSizes(*fields["image"]),
                "labels": tuple(fields["labels"]),
            }
        )
    except BundleError as error:
        raise ValueError(str(error)) from error


def _parse_tensor(fields: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(str(fields["name"]), str(fields["dtype"]), tuple(fields["shape"]))
