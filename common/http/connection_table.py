"""The connections of one HTTP port: their maximum number, and how long each may stay in each phase.

Each phase keeps its connections in the order in which they entered it, so the oldest one is found in O(1). The clock is an
argument; the only side effects are calls to `Connection.expire` and to the callbacks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from multiworld_serving.common.http.strict import MALFORMED, NOT_IMPLEMENTED, VERSION_NOT_SUPPORTED


class Phase(Enum):
    """What the connection waits for."""

    HANDSHAKE = "handshake"
    """Waits for the end of the TLS handshake."""
    FRESH = "fresh"
    """Waits for the first byte of its first request."""
    IDLE = "idle"
    """Waits for the first byte of the next request."""
    HEAD = "head"
    """Waits for the end of the request head (request line and headers)."""
    BODY = "body"
    """Waits for more of the body. Each part restarts the time; the request's timeout bounds the whole body."""
    PROCESSING = "processing"
    """The client waits for the response."""
    WRITE_BLOCKED = "write_blocked"
    """The client does not read its response. Progress restarts the time."""
    DRAINING = "draining"
    """Reads and drops the rest of the body of a rejected request."""
    CLOSING = "closing"
    """Waits for the connection to close."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of one connection and of all connections of a port."""

    max_connections: int = 10_000
    idle_timeout_s: float = 75.0
    header_timeout_s: float = 10.0
    stall_timeout_s: float = 10.0
    max_header_bytes: int = 32 * 2**10
    max_headers: int = 100

    def max_duration_s(self, phase: Phase) -> float | None:
        """Maximum time in this phase; None = unlimited."""
        return {
            Phase.HANDSHAKE: self.header_timeout_s,
            Phase.FRESH: self.idle_timeout_s,
            Phase.IDLE: self.idle_timeout_s,
            Phase.HEAD: self.header_timeout_s,
            Phase.PROCESSING: None,
            Phase.CLOSING: _CLOSE_S,
        }.get(phase, self.stall_timeout_s)

    @property
    def sweep_interval_s(self) -> float:
        """Interval between two searches for expired connections."""
        return min(1.0, self.idle_timeout_s / 4, self.header_timeout_s / 4, self.stall_timeout_s / 4)


_CLOSE_S: Final = 5.0
_EVICTABLE: Final = (Phase.HANDSHAKE, Phase.FRESH, Phase.HEAD, Phase.IDLE, Phase.WRITE_BLOCKED, Phase.BODY)
"""Phases in the order of eviction. A connection in PROCESSING is never evicted."""
_RECENTLY_ACTIVE_S: Final = 1.0
"""A connection that received a response this recently may have sent its next request, not read yet."""
EVICTED: Final = "evicted"
FULL: Final = "full"
HEAD_TOO_LARGE: Final = "head_too_large"
PIPELINED: Final = "pipelined"
CLOSING_REASONS: Final = (
    *(phase.value for phase in Phase if phase not in (Phase.FRESH, Phase.PROCESSING, Phase.CLOSING)),
    *(EVICTED, FULL, MALFORMED, NOT_IMPLEMENTED, VERSION_NOT_SUPPORTED, HEAD_TOO_LARGE, PIPELINED),
)
"""Why the server closes a connection: the phase whose time expired, or another reason. A label of a metric."""


class Connection(Protocol):
    """One connection in the table."""

    phase: Phase
    since_s: float

    def expire(self, reason: str) -> None:
        """Close the connection: its time in the phase expired, or it is evicted.

        On return the connection has left the table, is CLOSING, or, if it was not evicted and its client still reads the
        response, has its time restarted.
        """


class ConnectionTable:
    """All connections of a port.

    Args:
        on_closed: called with the reason whenever the server closes a connection because of its client.
        on_count: called with the number of connections at each sweep.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        on_closed: Callable[[str], None] = lambda _: None,
        on_count: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.limits = limits
        self.on_closed = on_closed
        self._on_count = on_count
        self._phases: dict[Phase, OrderedDict[Connection, None]] = {phase: OrderedDict() for phase in Phase}

    def __len__(self) -> int:
        return sum(len(connections) for connections in self._phases.values())

    def enter(self, connection: Connection, now_s: float, phase: Phase = Phase.FRESH) -> bool:
        """Add a new connection. If the table is full, evict another one; return False if none can be evicted."""
        while (fits := len(self) < self.limits.max_connections) is False and self._evict(now_s):
            pass
        connection.phase, connection.since_s = phase if fits else Phase.CLOSING, now_s
        self._phases[connection.phase][connection] = None
        return fits

    def leave(self, connection: Connection) -> None:
        """Remove a connection that has closed."""
        self._phases[connection.phase].pop(connection, None)

    def move(self, connection: Connection, phase: Phase, now_s: float) -> None:
        """Set the phase of a connection. Setting the current phase again restarts its time."""
        if self._phases[connection.phase].pop(connection, self) is not self:
            connection.phase, connection.since_s = phase, now_s
            self._phases[phase][connection] = None

    def extend_deadlines(self, seconds: float) -> None:
        """Extend all deadlines by the time for which this process was blocked and could not read."""
        for connections in self._phases.values():
            for connection in connections:
                connection.since_s += seconds

    def sweep(self, now_s: float) -> None:
        """Close expired connections."""
        for phase, connections in self._phases.items():
            max_duration_s = self.limits.max_duration_s(phase)
            while max_duration_s is not None and connections:
                oldest = next(iter(connections))
                if now_s - oldest.since_s < max_duration_s:
                    break
                oldest.expire(Phase.IDLE.value if phase is Phase.FRESH else phase.value)
        self._on_count(len(self))

    def _evict(self, now_s: float) -> bool:
        victim = self._longest(Phase.CLOSING, Phase.DRAINING)
        if victim is None:
            idlest = self._longest(Phase.HANDSHAKE, Phase.FRESH, Phase.IDLE)
            if idlest is not None and now_s - idlest.since_s >= _RECENTLY_ACTIVE_S:
                victim = idlest
        for phase in _EVICTABLE:
            victim = victim or self._longest(phase)
        if victim is not None:
            victim.expire(EVICTED)
        return victim is not None

    def _longest(self, *phases: Phase) -> Connection | None:
        """The connection that has been in one of these phases for longest."""
        oldest = [next(iter(self._phases[phase])) for phase in phases if self._phases[phase]]
        return min(oldest, key=lambda connection: connection.since_s, default=None)
