"""What a leader reports for scaling: the replicas that its load needs, and the workers that serve each stage. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

CAPACITY_FIELD = "X_CAPACITY="
"""Begins a message with a report; systemd ignores fields that begin with X_, see sd_notify(3)."""


@dataclass(frozen=True, slots=True)
class CapacityReport:
    """The report of one leader."""

    wanted: tuple[float, ...]
    """Replicas of each stage that the load of this leader needs, as fractions: see `server/scheduling/estimates/capacity.py`."""
    serving: tuple[tuple[str, ...], ...]
    """Names of the workers with a ready replica of each stage."""

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> CapacityReport | None:
        """The report; None if the text is not one, such as a line that was cut off."""
        try:
            fields = json.loads(text)
            wanted = tuple(float(share) for share in fields["wanted"])
            serving = tuple(tuple(str(name) for name in names) for names in fields["serving"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return cls(wanted, serving) if len(wanted) == len(serving) else None
