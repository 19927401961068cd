"""Converts predictions, images, errors and states to the fields and payloads of frames, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from multiworld_serving.common.wire import different_fields
from multiworld_serving.server.errors import InputUnreachableError, RequestRejected
from multiworld_serving.server.predictor import (
    FailureSnapshot,
    FrontendSnapshot,
    KeptRow,
    LeaderSnapshot,
    ModelVersion,
    PipelineSnapshot,
    Prediction,
    ReplicaSnapshot,
    ServedModel,
    StageSnapshot,
)

_INTERNAL = "internal"
_RELAY = "relay"


def prediction_fields(prediction: Prediction) -> dict[str, Any]:
    """A prediction without its probabilities."""
    return {name: value for name, value in vars(prediction).items() if name != "probabilities"}


def parse_kept(fields: Mapping[str, Any]) -> KeptRow | None:
    """Where the probabilities of a PREDICTION frame are. Raises TypeError or ValueError if the field is invalid."""
    kept = fields["kept"]
    if kept is None:
        return None
    holder, tensor, row, shape = kept
    return KeptRow(str(holder), int(tensor), int(row), tuple(map(int, shape)))


def prediction_payload(prediction: Prediction) -> memoryview:
    """The probabilities of a prediction, float32."""
    return prediction.probabilities.contiguous().numpy().data.cast("B")


def parse_prediction(fields: Mapping[str, Any], probabilities: Tensor) -> Prediction:
    """The inverse of `prediction_fields`, with the probabilities of the payload or of the worker that keeps them."""
    return Prediction(**{**fields, "path": tuple(fields["path"]), "kept": None}, probabilities=probabilities)


def parse_probabilities(payload: memoryview) -> Tensor:
    """The inverse of `prediction_payload`."""
    return torch.frombuffer(payload, dtype=torch.float32)


def image_payload(image: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 image."""
    return image.numpy().data.cast("B")


def parse_image(payload: memoryview, side: int) -> Tensor:
    """uint8 [3, side, side], sharing memory with `payload`. Raises ValueError or RuntimeError if the size is wrong."""
    if len(payload) != 3 * side * side:
        raise ValueError(f"the image has {len(payload)} bytes; expected 3 x {side} x {side}")
    return torch.frombuffer(payload, dtype=torch.uint8).view(3, side, side)


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
        }
    )


def _parse_replica(fields: Mapping[str, Any]) -> ReplicaSnapshot:
    failure = fields["last_failure"]
    return ReplicaSnapshot(**{**fields, "last_failure": failure and FailureSnapshot(**failure)})


def model_fields(model: ServedModel) -> dict[str, Any]:
    """The fields of a WELCOME frame."""
    return asdict(model)


def parse_model(fields: Mapping[str, Any]) -> ServedModel:
    """The inverse of `model_fields`. Raises KeyError, TypeError or ValueError if they are invalid."""
    _require_fields(ServedModel, "WELCOME", found=fields)
    return ServedModel(**{**fields, "labels": tuple(fields["labels"])})
