"""Predicts all samples of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from multiworld_serving.server.predictor import Prediction, Predictor


async def predict_samples(
    predictor: Predictor, rows: Sequence[Tensor], key: str, *, deadline_s: float, request_id: str
) -> list[Prediction]:
    """Predict all samples. The predictions differ in their outputs only.

    Raises:
        RequestRejected: a sample was rejected, and so the request is.
    """
    found = await predictor.predict(torch.stack(tuple(rows)), deadline_s=deadline_s, request_id=request_id, key=key)
    return [replace(found, output=row) for row in found.output]
