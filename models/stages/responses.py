"""What a result of the last stage is as a response over HTTP."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from multiworld_serving.models.stages.api import Response
from multiworld_serving.models.stages.objects import ObjectError


def response_of(result: Any) -> Response:
    """The response: bytes and texts as they are, and everything else as JSON. Raises ObjectError for what JSON cannot express."""
    if isinstance(result, Response):
        return result
    if isinstance(result, bytes):
        return Response(result)
    if isinstance(result, str):
        return Response(result.encode("utf-8", "replace"), "text/plain; charset=utf-8")
    return Response(as_json(result), "application/json")


def as_json(result: Any) -> bytes:
    """A result as JSON; tensors become lists. Raises ObjectError."""
    try:
        return msgspec.json.encode(result, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ObjectError(f"what JSON cannot express: {str(error)[:200]}") from error


def _plain(value: object) -> object:
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    raise TypeError(f"a value of the type {type(value).__name__}")
