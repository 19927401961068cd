"""Keeps exceptions of observers (metrics, traces, event feeds, callbacks) away from the code that they observe."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def suppress_errors(call: Callable[P, R]) -> Callable[P, R | None]:
    """Wrap a function so that it never raises. A call that fails returns None.

    Only the first exception is logged, because the function may be called thousands of times a second.
    """
    name, logged = getattr(call, "__qualname__", repr(call)), False

    @functools.wraps(call)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
        nonlocal logged
        try:
            return call(*args, **kwargs)
        except Exception:
            if not logged:
                logged = True
                logger.exception("%s failed; further exceptions of it are not logged", name)
            return None

    return guarded
