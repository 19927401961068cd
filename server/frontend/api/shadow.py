"""Copies of requests for a version that serves as a shadow: its results are compared with those of the version that responds."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import torch
from torch import Tensor

from multiworld_serving.common.service.errors import DeadlineError, RequestRejected
from multiworld_serving.common.service.predictor import Prediction, ServedModel
from multiworld_serving.server.frontend.api.inference import Inference, output_tensors
from multiworld_serving.server.frontend.http.open_request import DEADLINE_GRACE_S
from multiworld_serving.server.frontend.observability.request_records import ModelRequests, ShadowOutcome

logger = logging.getLogger(__name__)

_MAX_COPIES = 8
"""Copies in flight for each shadow of a frontend. Requests that arrive meanwhile are not copied."""
_WAITED_S = 0.01
"""A request that waited for longer than this, and longer than it was computed, is not copied: a copy could make the next one wait."""
_TOLERANCE = 0.01
"""Values are equal if they differ by at most this share of the largest one."""


class Shadow:
    """Sends copies to the leaders of a shadow. Nothing waits for them.

    Args:
        requests: counts the outcomes.
    """

    def __init__(self, requests: ModelRequests) -> None:
        self._requests = requests
        self._copies: set[asyncio.Task[None]] = set()

    def copy(self, shadow: Inference | None, rows: Tensor, key: str, model: ServedModel, response: Prediction) -> None:
        """Have the shadow compute the rows of a request with this response of `model`, unless one of them is busy or it is not ready."""
        is_busy = len(self._copies) >= _MAX_COPIES or response.queue_s > max(response.compute_s, _WAITED_S)
        if shadow is None or is_busy or not shadow.gate.pipeline.ready:
            self._requests.count_copy("dropped")
        elif not _takes(shadow.signature.model, model):
            self._requests.count_copy("incompatible")
        else:
            task = asyncio.create_task(self._compute(shadow, rows, key, model, response))
            self._copies.add(task)
            task.add_done_callback(self._copies.discard)

    async def _compute(
        self, shadow: Inference, rows: Tensor, key: str, model: ServedModel, response: Prediction
    ) -> None:
        started_s, limit_s, status = time.monotonic(), shadow.gate.limits.timeout_s, 200
        outcome: ShadowOutcome = "failed"
        try:
            async with asyncio.timeout(limit_s + DEADLINE_GRACE_S):
                found = await shadow.gate.pipeline.predict(
                    rows, key=key, deadline_s=started_s + limit_s, request_id="shadow"
                )
            outcome = "equal" if _equal(model, response, shadow.signature.model, found) else "different"
        except RequestRejected as error:
            status = error.status
        except TimeoutError:
            status = DeadlineError.status
        except Exception:
            status = 500
            logger.exception("a copy of a request failed")
        self._requests.count_copy(outcome, (status, time.monotonic() - started_s))


def _takes(shadow: ServedModel, model: ServedModel) -> bool:
    """Whether the shadow takes the inputs of this model. Streams are not copied."""
    if model.pipeline is not None and model.pipeline.stages[-1].streams:
        return False
    kinds = [(each.inputs, each.image, each.pipeline is None) for each in (shadow, model)]
    return kinds[0] == kinds[1]


def _equal(model: ServedModel, response: Prediction, shadow: ServedModel, found: Prediction) -> bool:
    """Whether the results agree: on the most probable class of each row if both classify, on the objects of Python, else on all values."""
    if model.pipeline is not None:
        return torch.equal(response.output, found.output)
    own, other = output_tensors(response, model), output_tensors(found, shadow)
    if model.labels and shadow.labels:
        best, others = own[0].argmax(1).tolist(), other[0].argmax(1).tolist()
        return [model.labels[each] for each in best] == [shadow.labels[each] for each in others]
    names = [[spec.name for spec in each.outputs] for each in (model, shadow)]
    return names[0] == names[1] and all(map(_close, own, other))


def _close(a: Tensor, b: Any) -> bool:
    if a.shape != b.shape or not a.numel():
        return bool(a.shape == b.shape)
    a, b = a.double(), b.double()
    return bool(torch.allclose(a, b, rtol=0, atol=_TOLERANCE * float(a.abs().max()), equal_nan=True))
