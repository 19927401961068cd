"""Converts predictions, images, errors and outcomes to the fields and payloads of frames, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from multiworld_serving.server.errors import RequestRefused
from multiworld_serving.server.observability.inference_statistics import ImageTimes, InferenceTimes
from multiworld_serving.server.observability.request_recorder import RequestOutcome
from multiworld_serving.server.predictor import ModelVersion, Prediction

_INTERNAL = "internal"


def prediction_fields(prediction: Prediction) -> dict[str, Any]:
    """A prediction without its probabilities."""
    return {name: value for name, value in vars(prediction).items() if name != "probabilities"}


def prediction_payload(prediction: Prediction) -> memoryview:
    """The probabilities of a prediction, float32."""
    return prediction.probabilities.contiguous().numpy().data.cast("B")


def parse_prediction(fields: Mapping[str, Any], payload: memoryview) -> Prediction:
    """The inverse of `prediction_fields` and `prediction_payload`."""
    return Prediction(
        **{**fields, "path": tuple(fields["path"])}, probabilities=torch.frombuffer(payload, dtype=torch.float32)
    )


def image_payload(image: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 image."""
    return image.numpy().data.cast("B")


def parse_image(payload: memoryview, side: int) -> Tensor:
    """uint8 [3, side, side], sharing memory with `payload`. Raises ValueError or RuntimeError if the size is wrong."""
    if len(payload) != 3 * side * side:
        raise ValueError(f"the image has {len(payload)} bytes; expected 3 x {side} x {side}")
    return torch.frombuffer(payload, dtype=torch.uint8).view(3, side, side)


def refusal_fields(refusal: RequestRefused | None) -> dict[str, Any]:
    """An error; None = an unexpected exception."""
    if refusal is None:
        return {"reason": _INTERNAL, "detail": "the leader failed on this request; see its log"}
    return {"reason": refusal.reason, "detail": refusal.detail, "retry_after_s": refusal.retry_after_s}


def parse_refusal(fields: Mapping[str, Any]) -> Exception:
    """The inverse of `refusal_fields`."""
    if fields["reason"] == _INTERNAL:
        return RuntimeError(fields["detail"])
    return RequestRefused.for_reason(fields["reason"], fields["detail"], retry_after_s=fields["retry_after_s"])


def state_fields(version: ModelVersion, refusal: RequestRefused | None) -> dict[str, Any]:
    """The current version, and why requests are rejected, if they are."""
    return {
        "version": version.name,
        "number": version.number,
        "refusal": None if refusal is None else refusal_fields(refusal),
    }


def outcome_fields(outcome: RequestOutcome) -> dict[str, Any]:
    """The outcome of a request."""
    return vars(outcome) | {"times": outcome.times and outcome.times._asdict()}


def parse_outcome(fields: Mapping[str, Any]) -> RequestOutcome:
    """The inverse of `outcome_fields`."""
    times = fields["times"]
    if times is not None:
        times = InferenceTimes(**{**times, "images": tuple(ImageTimes(*image) for image in times["images"])})
    return RequestOutcome(**{**fields, "times": times})
