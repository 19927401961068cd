"""A change of the models of a service. A frontend passes it on to the supervisor, which writes the outcome into a file. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

CHANGE_FIELD = "X_MODELS="
"""Begins a message with a change; see `capacity_report.CAPACITY_FIELD`."""
MAX_BYTES = 1 << 15


class ModelChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Add a model, or remove one."""

    action: Literal["add", "remove"]
    name: str
    source: str = ""
    """Of an added model: a name of torchvision, or a path below --weights-dir."""
    settings: dict[str, str] = {}
    """As in a table [[models]]."""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 600.0
    """Longest time until an added model is ready."""
    id: str = ""
