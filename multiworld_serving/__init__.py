"""Fault-tolerant model serving: pipeline stages on many workers, where a failure breaks one link only.

The sub-packages are links to the folders of the same names at the top of the repository (docs/decisions/0024-packages.md).
Start reading at docs/architecture.md, then `server/leader/leader.py`.
"""

from importlib.util import find_spec
from pathlib import Path

_library = find_spec("multiworld")
if _library is not None and any(
    (Path(path) / "watchdog.py").exists() for path in _library.submodule_search_locations or ()
):
    raise ImportError(
        f"{_library.origin} has files of pymultiworld, which has the same import name; uninstall it, then install multiworld-serving again"
    )
