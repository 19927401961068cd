"""`multiworld version`: what is installed here."""

import json
import platform
from importlib.metadata import version as installed

from cli.service import AsJson


def version(as_json: AsJson = False) -> int:
    """Print the versions of multiworld and of what it computes with."""
    versions = {
        "multiworld": installed("multiworld-serving"),
        "python": platform.python_version(),
        "torch": installed("torch"),
        "torchvision": installed("torchvision"),
    }
    print(json.dumps(versions) if as_json else "\n".join(f"{name} {number}" for name, number in versions.items()))
    return 0
