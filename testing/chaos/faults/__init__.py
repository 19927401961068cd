"""The catalogue of faults. To add one, decorate a function with `@fault` in one of the modules `on_*`, and describe it in docs/chaos.md.

`fault.py` has the decorator, `context.py` what a fault may use: its targets, the service, and waiting for effects.
"""

from multiworld_serving.testing.chaos.faults import (  # noqa: F401 - they declare faults
    on_clients,
    on_containers,
    on_edges,
    on_leaders,
    on_workers,
)
from multiworld_serving.testing.chaos.faults.fault import REGISTRY

PROCESS_FAULTS = tuple(fault for fault in REGISTRY if fault.of == "process")
"""Faults that are possible on a service of processes."""
CONTAINER_FAULTS = tuple(fault for fault in REGISTRY if fault.of == "container")
"""Faults that need a Compose project."""
ALL_FAULTS = tuple({fault.name: fault for fault in (*PROCESS_FAULTS, *CONTAINER_FAULTS)}.values())
"""Faults that are possible on a Compose project. A container fault replaces the process fault of the same name."""
BY_NAME = {fault.name: fault for fault in ALL_FAULTS}
