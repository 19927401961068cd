"""The last incident: what failed, what was sent again because of it, and how many requests failed meanwhile. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from multiworld_serving.server.observability.metrics import Totals
from multiworld_serving.server.snapshots import ServiceState

_SETTLE_S = 5.0
"""Errors that a failure causes arrive within this time after the service is ready again."""


@dataclass(frozen=True)
class Incident:
    """From the first failure until the service is ready again. Counts are those of this process."""

    at_unix_s: float
    """Of the first failure."""
    where: str
    """The world, such as "s0.r1", or the leader."""
    worker: str | None
    """None: a leader failed."""
    detail: str
    """Cause and details of the first failure; of a leader, its state."""
    failures: int = 1
    """Workers and leaders that failed."""
    rerouted: int = 0
    """Batches moved to another replica, at all leaders."""
    resubmitted: int = 0
    """Times that a request was sent to another leader, or again."""
    failed: int = 0
    """Requests that ended with status 5xx."""
    ended_unix_s: float | None = None
    """When the service was ready again; None: it is not yet."""


class IncidentLog:
    """Keeps the last incident.

    Args:
        totals: counts so far.
    """

    def __init__(self, totals: Totals) -> None:
        self.last: Incident | None = None
        self._totals = self._before = totals
        self._open = False

    def failed(self, at_unix_s: float, where: str, worker: str | None, detail: str) -> None:
        """A worker or a leader has failed."""
        if self._open and self.last is not None:
            self.last = replace(self.last, failures=self.last.failures + 1, ended_unix_s=None)
        else:
            self.last, self._before, self._open = Incident(at_unix_s, where, worker, detail), self._totals, True

    def tick(self, now_unix_s: float, state: ServiceState, totals: Totals, moved: int) -> None:
        """Update the counts. Call regularly, after `failed`; `moved` are the batches that were moved since the last call."""
        self._totals = totals
        if not self._open or self.last is None:
            return
        ended_unix_s = self.last.ended_unix_s
        if ended_unix_s is None and state == "ready":
            ended_unix_s = now_unix_s
        self.last = replace(
            self.last,
            rerouted=self.last.rerouted + moved,
            resubmitted=totals.resubmitted - self._before.resubmitted,
            failed=totals.failed - self._before.failed,
            ended_unix_s=ended_unix_s,
        )
        self._open = ended_unix_s is None or now_unix_s - ended_unix_s < _SETTLE_S
