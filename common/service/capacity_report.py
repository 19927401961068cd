"""What a leader reports for scaling: the replicas that its load needs, and the workers that serve each stage. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

import msgspec

CAPACITY_FIELD = "X_CAPACITY="
"""Begins a message with a report; systemd ignores fields that begin with X_, see sd_notify(3)."""
_ROUNDING = 1e-6


class CapacityReport(msgspec.Struct, frozen=True):
    """The report of one leader."""

    wanted: tuple[float, ...]
    """Replicas of each stage that the load of this leader needs, as fractions: see `server/leader/scheduling/estimates/capacity.py`."""
    serving: tuple[tuple[str, ...], ...]
    """Names of the workers with a ready replica of each stage."""

    def __post_init__(self) -> None:
        if len(self.wanted) != len(self.serving):
            raise ValueError(f"{len(self.wanted)} and {len(self.serving)} stages")

    def to_json(self) -> str:
        """One line of JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> CapacityReport | None:
        """The report; None if the text is not one, such as a line that was cut off."""
        try:
            return msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None


def combine(leaders: Iterable[Sequence[float]], at_least: int) -> tuple[int, ...]:
    """Replicas of each stage for the load of all leaders, which share the workers; never fewer than `at_least`."""
    return tuple(max(at_least, ceil(sum(shares) - _ROUNDING)) for shares in zip(*leaders, strict=True))
