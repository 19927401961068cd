"""What frames carry, and what it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from server.accounts import RequestOutcome
from server.errors import RequestRefused
from server.predictor import Answer, ModelVersion
from server.v2.statistics import ImageTimes, InferenceTimes

_INTERNAL = "internal"


def answer_facts(answer: Answer) -> dict[str, Any]:
    """An answer without its numbers."""
    return {name: value for name, value in vars(answer).items() if name != "probabilities"}


def answer_payload(answer: Answer) -> memoryview:
    """Its numbers."""
    return answer.probabilities.contiguous().numpy().data.cast("B")


def answer_of(facts: Mapping[str, Any], payload: memoryview) -> Answer:
    """What the two above were made of."""
    return Answer(
        **{**facts, "path": tuple(facts["path"])}, probabilities=torch.frombuffer(payload, dtype=torch.float32)
    )


def image_payload(image: Tensor) -> memoryview:
    """uint8, contiguous."""
    return image.numpy().data.cast("B")


def image_of(payload: memoryview, side: int) -> Tensor:
    """uint8 [3, side, side], in the memory of `payload`. Raises ValueError, RuntimeError when it has not so many bytes."""
    if len(payload) != 3 * side * side:
        raise ValueError(f"an image of {len(payload)} bytes; expected 3 x {side} x {side}")
    return torch.frombuffer(payload, dtype=torch.uint8).view(3, side, side)


def refusal_facts(refusal: RequestRefused | None) -> dict[str, Any]:
    """A refusal; None is what happened by a defect of ours."""
    if refusal is None:
        return {"reason": _INTERNAL, "detail": "the leader failed on this request; its log says why"}
    return {"reason": refusal.reason, "detail": refusal.detail, "retry_after_s": refusal.retry_after_s}


def refusal_of(facts: Mapping[str, Any]) -> Exception:
    """To be raised."""
    if facts["reason"] == _INTERNAL:
        return RuntimeError(facts["detail"])
    return RequestRefused.for_reason(facts["reason"], facts["detail"], retry_after_s=facts["retry_after_s"])


def state_facts(version: ModelVersion, refusal: RequestRefused | None) -> dict[str, Any]:
    """The version that serves, and why requests are refused, if they are."""
    return {
        "version": version.name,
        "number": version.number,
        "refusal": None if refusal is None else refusal_facts(refusal),
    }


def outcome_facts(outcome: RequestOutcome) -> dict[str, Any]:
    """How a request ended."""
    return vars(outcome) | {"times": outcome.times and outcome.times._asdict()}


def outcome_of(facts: Mapping[str, Any]) -> RequestOutcome:
    """What the above was made of."""
    times = facts["times"]
    if times is not None:
        times = InferenceTimes(**{**times, "images": tuple(ImageTimes(*image) for image in times["images"])})
    return RequestOutcome(**{**facts, "times": times})
