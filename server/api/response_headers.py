"""Response headers that describe how the pipeline computed a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from multiworld_serving.server.predictor import Prediction


def prediction_headers(predictions: Sequence[Prediction]) -> dict[str, str]:
    """Version, path and attempts. If the images took several paths, each distinct path is listed once."""
    versions = dict.fromkeys(_quoted(prediction.version, ":+@,") for prediction in predictions)
    paths = dict.fromkeys(",".join(_quoted(world, ":+@") for world in prediction.path) for prediction in predictions)
    return {
        "X-Model-Version": ";".join(versions),
        "X-Path": ";".join(paths),
        "X-Attempts": str(max(prediction.attempts for prediction in predictions)),
    }


@lru_cache(1024)
def _quoted(name: str, safe: str) -> str:
    """Percent-encoded: a version may be a file name, and header values are limited to ASCII."""
    return quote(name, safe=safe)


HEADER_DOCUMENTATION: dict[str, Any] = {
    "X-Request-Id": {"description": "The client's id or a new one.", "schema": {"type": "string"}},
    "X-Model-Version": {"description": "Version of the weights.", "schema": {"type": "string"}},
    "X-Path": {
        "description": "World that computed each stage, in order; several paths are separated by semicolons.",
        "schema": {"type": "string"},
    },
    "X-Attempts": {
        "description": "1 plus the number of retries; for several images, the highest.",
        "schema": {"type": "integer"},
    },
}
