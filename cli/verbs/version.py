"""`multiworld version`: show installed versions."""

import json
import platform
from importlib.metadata import version as installed

from multiworld_serving.cli.service import AsJson


def version(as_json: AsJson = False) -> int:
    """Print the versions of multiworld, Python, torch and torchvision."""
    versions = {
        "multiworld": installed("multiworld-serving"),
        "python": platform.python_version(),
        "torch": installed("torch"),
        "torchvision": installed("torchvision"),
    }
    print(json.dumps(versions) if as_json else "\n".join(f"{name} {number}" for name, number in versions.items()))
    return 0
