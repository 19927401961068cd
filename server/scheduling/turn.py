"""The event being handled."""

from __future__ import annotations

from dataclasses import dataclass, field

from server.scheduling.actions import Action


@dataclass(slots=True)
class Turn:
    """Its time, and what is to be done about it so far. Shared by all parts of the scheduler."""

    now_s: float = float("-inf")
    actions: list[Action] = field(default_factory=list)
