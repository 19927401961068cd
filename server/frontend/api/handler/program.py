"""What runs in the process of a handler: the functions that the frontend calls there. Imports neither torch nor the server."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from multiworld_serving.common.config.process import exit_with_parent

T = TypeVar("T")

Outcome = tuple[Literal["result"], T] | tuple[Literal["invalid", "failed"], str]
"""A result; or the text of a ValueError, for the client; or another error, for the log."""

_DTYPES = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"))
_handler: Any = None


def load(where: str) -> Outcome[None]:
    """Load the handler of this process, FILE.py:CLASS."""
    global _handler  # noqa: PLW0603 - one handler for each process
    exit_with_parent()
    os.dup2(2, 1)  # what the handler prints goes to the log
    try:
        _handler = load_handler(where)
    except ValueError as error:
        return "failed", str(error)
    return "result", None


def decode(body: bytes, content_type: str) -> Outcome[dict[str, np.ndarray[Any, Any]]]:
    """Inputs of the model by name."""
    return _outcome(lambda: _arrays(_handler.decode(body, content_type)), may_refuse=True)


def encode(outputs: dict[str, np.ndarray[Any, Any]]) -> Outcome[tuple[bytes, str]]:
    """Body and content type."""

    def encoded() -> tuple[bytes, str]:
        body, content_type = _handler.encode(outputs)
        return bytes(body), str(content_type)

    return _outcome(encoded, may_refuse=False)


def load_handler(where: str) -> Any:
    """Create the handler. Raises ValueError that says what is wrong with `where`, FILE.py:CLASS."""
    file, separator, name = where.rpartition(":")
    path = Path(file)
    if not separator or not name.isidentifier():
        raise ValueError(f"{where!r} is not FILE.py:CLASS, such as tokenizer.py:Handler")
    if not path.is_file():
        raise ValueError(f"there is no file {file}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
        cls = getattr(module, name, None)
        if not isinstance(cls, type):
            raise ValueError(f"{file} has no class {name}")  # noqa: TRY004 - the user's input is wrong
        handler = cls()
    except ValueError:
        raise
    except BaseException as error:
        raise ValueError(f"{file} cannot be loaded: {_last_line(error)}") from error
    for method in ("decode", "encode"):
        if not callable(getattr(handler, method, None)):
            raise ValueError(f"the class {name} of {file} has no method {method}")  # noqa: TRY004 - as above
    return handler


def _last_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at line {frames[-1].lineno} of {frames[-1].filename}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _outcome(work: Callable[[], T], *, may_refuse: bool) -> Outcome[T]:
    try:
        return "result", work()
    except BaseException as error:  # noqa: BLE001 - whatever the user's code raises goes to the log
        if may_refuse and isinstance(error, ValueError):
            return "invalid", str(error) or "the handler does not accept this body"
        return "failed", f"the handler raised {_last_line(error)}\n{traceback.format_exc()}"


def _arrays(given: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays that the frontend can read. Raises TypeError for what is not an array of numbers or booleans."""
    if not isinstance(given, dict):
        raise TypeError(f"decode returned {type(given).__name__}; expected a dict of arrays")
    found = {str(name): np.array(array, order="C") for name, array in given.items()}
    for name, array in found.items():
        if array.dtype.name not in _DTYPES:
            raise TypeError(f"{name!r:.60} is an array of {array.dtype}; expected numbers or booleans")
    return found
