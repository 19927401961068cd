"""The event being handled."""

from __future__ import annotations

from dataclasses import dataclass, field

from multiworld_serving.server.scheduling.actions import Action


@dataclass(slots=True)
class StepContext:
    """The time of the current event and the actions decided so far. Shared by all parts of the scheduler."""

    now_s: float = float("-inf")
    actions: list[Action] = field(default_factory=list)
