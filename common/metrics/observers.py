"""Keeps exceptions of observers (metrics, traces, event feeds, callbacks) away from the code that they observe."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

logger = logging.getLogger(__name__)

T = TypeVar("T")


def guarded(observer: T) -> T:
    """Wrap a function or an object so that its calls never raise. A call that fails returns None.

    Only the first exception of each function is logged, because it may be called thousands of times a second.
    """
    if callable(observer):
        return cast(T, _guarded_call(observer, getattr(observer, "__qualname__", repr(observer))))
    return cast(T, _Guarded(observer))


class _Guarded:
    """Forwards to an object and suppresses exceptions of its methods."""

    def __init__(self, observer: object) -> None:
        self._observer = observer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._observer, name)
        if callable(found):
            found = _guarded_call(found, f"{type(self._observer).__name__}.{name}")
            setattr(self, name, found)  # caches the wrapper, which remembers whether it has logged
        return found


def _guarded_call(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    logged = False

    def guard(*args: Any, **kwargs: Any) -> Any:
        nonlocal logged
        try:
            return call(*args, **kwargs)
        except Exception:
            if not logged:
                logged = True
                logger.exception("%s failed; further exceptions of it are not logged", name)
            return None

    return guard
