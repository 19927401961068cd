"""Fault-tolerant model serving: pipeline stages on many workers, where a failure breaks one link only.

`Stage`, `Bundle`, `Request`, `Response` and `InvalidInput` are for pipelines in Python (docs/models.md). The sub-packages are links to the
folders of the same names at the top of the repository (docs/decisions/0024-packages.md). Start reading at docs/architecture.md, then
`server/leader/leader.py`.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiworld_serving.models.stages.api import Bundle, InvalidInput, Request, Response, Stage

__all__ = ["Bundle", "InvalidInput", "Request", "Response", "Stage"]

_library = find_spec("multiworld")
if _library is not None and any(
    (Path(path) / "watchdog.py").exists() for path in _library.submodule_search_locations or ()
):
    raise ImportError(
        f"{_library.origin} has files of pymultiworld, which has the same import name; uninstall it, then install multiworld-serving again"
    )


def __getattr__(name: str) -> Any:
    """The classes for pipelines, which are imported when they are used."""
    if name in __all__:
        return getattr(import_module("multiworld_serving.models.stages.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
