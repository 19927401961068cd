"""Predicts all samples of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from torch import Tensor

from multiworld_serving.server.predictor import Prediction, Predictor


async def predict_samples(
    predictor: Predictor, rows: Sequence[Tensor], key: str, *, deadline_s: float, request_id: str
) -> list[Prediction]:
    """Predict all samples with the same version: if it changes meanwhile, repeat the samples of the old one.

    Raises:
        RequestRejected: a sample was rejected, and so the request is.
    """
    predictions = await _predict_all(predictor, rows, key, deadline_s, request_id)
    while len({prediction.version_number for prediction in predictions}) > 1:
        number = predictor.version.number
        stale = [at for at, prediction in enumerate(predictions) if prediction.version_number != number]
        fresh = await _predict_all(predictor, [rows[at] for at in stale], key, deadline_s, request_id)
        for at, prediction in zip(stale, fresh, strict=True):
            predictions[at] = prediction
    return predictions


async def _predict_all(
    predictor: Predictor, rows: Sequence[Tensor], key: str, deadline_s: float, request_id: str
) -> list[Prediction]:
    """Predict all samples. The first error cancels the others: the request fails as a whole."""
    tasks: list[asyncio.Task[Prediction]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for row in rows:
                predict = predictor.predict(row, deadline_s=deadline_s, request_id=request_id, key=key)
                tasks.append(group.create_task(predict))
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
