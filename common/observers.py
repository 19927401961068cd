"""Keeps exceptions of observers (metrics, traces, event feeds, callbacks) away from the code that they observe."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


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


def observer(cls: C) -> C:
    """Class decorator: the public methods never raise. They return nothing, or None stands for a failure."""
    for name, method in list(vars(cls).items()):
        if inspect.isfunction(method) and not name.startswith("_"):
            setattr(cls, name, suppress_errors(method))
    return cls
