"""The catalogue of faults. To add one, decorate a function with `@fault` in one of the modules `on_*`, and describe it in docs/chaos.md.

`fault.py` has the decorator, and what a fault may use: its targets, the service, and waiting for effects.
"""

from multiworld_serving.testing.chaos.faults import (  # noqa: F401 - they declare faults
    on_clients,
    on_edges,
    on_leaders,
    on_workers,
)
from multiworld_serving.testing.chaos.faults.fault import FAULTS

__all__ = ["FAULTS"]
