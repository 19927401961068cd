"""What the headers of an answer tell about its way through the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from server.predictor import Answer


def answer_headers(answers: Sequence[Answer]) -> dict[str, str]:
    """Version, path and attempts. Several images may have gone several ways: each way stands there once."""
    # Percent-encoded, because a version may be the name of a person's file and a header is neither free text nor Unicode.
    versions = dict.fromkeys(quote(answer.version, safe=":+@,") for answer in answers)
    paths = dict.fromkeys(",".join(quote(world, safe=":+@") for world in answer.path) for answer in answers)
    return {
        "X-Model-Version": ";".join(versions),
        "X-Path": ";".join(paths),
        "X-Attempts": str(max(answer.attempts for answer in answers)),
    }


HEADER_DOCUMENTATION: dict[str, Any] = {
    "X-Request-Id": {"description": "The client's id or a new one.", "schema": {"type": "string"}},
    "X-Model-Version": {"description": "Which weights answered.", "schema": {"type": "string"}},
    "X-Path": {
        "description": "The world that answered for each stage, in order; several ways are parted by semicolons.",
        "schema": {"type": "string"},
    },
    "X-Attempts": {
        "description": "How often it was sent to a worker; of several images, the highest.",
        "schema": {"type": "integer"},
    },
}
