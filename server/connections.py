"""The connections of one HTTP port: how many there may be, and how long each may keep us waiting.

Every connection is in one phase. Those of a phase stand in the order in which they entered it, so that the one that has waited
longest is found at once, be there ten thousand of them. Pure but for what it tells the connections: time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol


class Phase(Enum):
    """What a connection is waited for, or waits for."""

    FRESH = "fresh"
    """The first byte of its first request."""
    IDLE = "idle"
    """The first byte of another request."""
    HEAD = "head"
    """The end of a request's head."""
    BODY = "body"
    """More of a body; renewed by each piece. All of it together is bounded by the request's time."""
    ANSWERING = "answering"
    """The client waits for us."""
    STUCK = "stuck"
    """The client takes nothing of its answer; renewed when it has taken a good part."""
    DRAINING = "draining"
    """The rest of a body that was refused."""
    CLOSING = "closing"
    """The connection to be gone."""


@dataclass(frozen=True)
class ConnectionLimits:
    """What one connection, and all together, may take."""

    max_connections: int = 10_000
    idle_timeout_s: float = 75.0
    header_timeout_s: float = 10.0
    stall_timeout_s: float = 10.0
    max_header_bytes: int = 32 * 2**10
    max_headers: int = 100

    def longest_s(self, phase: Phase) -> float | None:
        """How long a connection may be in this phase; None for as long as it takes."""
        return {
            Phase.FRESH: self.idle_timeout_s,
            Phase.IDLE: self.idle_timeout_s,
            Phase.HEAD: self.header_timeout_s,
            Phase.ANSWERING: None,
            Phase.CLOSING: _CLOSE_S,
        }.get(phase, self.stall_timeout_s)

    @property
    def sweep_s(self) -> float:
        """Pause between two looks at who is overdue."""
        return min(1.0, self.idle_timeout_s / 4, self.header_timeout_s / 4, self.stall_timeout_s / 4)


_CLOSE_S: Final = 5.0
_EVICTABLE: Final = (Phase.FRESH, Phase.HEAD, Phase.IDLE, Phase.STUCK, Phase.BODY)
"""In the order in which they have to make room when nobody more deserves it; who waits for us never has to."""
_IN_CONVERSATION_S: Final = 1.0
"""Who was answered so lately may have sent the next request already, which nobody has read yet."""
EVICTED: Final = "evicted"
FULL: Final = "full"
MALFORMED: Final = "malformed"
HEAD_TOO_LARGE: Final = "head_too_large"
PIPELINED: Final = "pipelined"
CLOSING_REASONS: Final = (
    *(phase.value for phase in Phase if phase not in (Phase.FRESH, Phase.ANSWERING, Phase.CLOSING)),
    *(EVICTED, FULL, MALFORMED, HEAD_TOO_LARGE, PIPELINED),
)
"""Why a connection is closed for what its client did: the phase in which it was for too long, or another reason."""


class Connection(Protocol):
    """One connection, as it is told what becomes of it."""

    phase: Phase
    since_s: float

    def expire(self, reason: str) -> None:
        """Be closed: it was in its phase for too long, or has to make room.

        It has left, is CLOSING or, when it was not to make room and goes on taking its answer, has its time renewed when this returns.
        """


class Connections:
    """All connections of a port.

    Args:
        closed: told why, each time that a connection is closed for what its client did.
        counted: told now and then how many there are.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        closed: Callable[[str], None] = lambda _: None,
        counted: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.limits = limits
        self.closed = closed
        self._counted = counted
        self._phases: dict[Phase, OrderedDict[Connection, None]] = {phase: OrderedDict() for phase in Phase}

    def __len__(self) -> int:
        return sum(len(connections) for connections in self._phases.values())

    def enter(self, connection: Connection, now_s: float) -> bool:
        """A connection was made. When there are too many, the least deserving one makes room; False when nobody can."""
        while (fits := len(self) < self.limits.max_connections) is False and self._evict(now_s):
            pass
        connection.phase, connection.since_s = Phase.FRESH if fits else Phase.CLOSING, now_s
        self._phases[connection.phase][connection] = None
        return fits

    def leave(self, connection: Connection) -> None:
        """A connection has ended."""
        self._phases[connection.phase].pop(connection, None)

    def move(self, connection: Connection, phase: Phase, now_s: float) -> None:
        """A connection is in this phase from now on; to be told the phase that it is in renews its time."""
        if self._phases[connection.phase].pop(connection, self) is not self:
            connection.phase, connection.since_s = phase, now_s
            self._phases[phase][connection] = None

    def forgive(self, seconds: float) -> None:
        """This process itself stood still for so long: nobody could be heard, and it is held against nobody."""
        for connections in self._phases.values():
            for connection in connections:
                connection.since_s += seconds

    def sweep(self, now_s: float) -> None:
        """Close who is overdue."""
        for phase, connections in self._phases.items():
            longest_s = self.limits.longest_s(phase)
            while longest_s is not None and connections:
                oldest = next(iter(connections))
                if now_s - oldest.since_s < longest_s:
                    break
                oldest.expire(Phase.IDLE.value if phase is Phase.FRESH else phase.value)
        self._counted(len(self))

    def _evict(self, now_s: float) -> bool:
        victim = self._longest(Phase.CLOSING, Phase.DRAINING)
        if victim is None:
            idlest = self._longest(Phase.FRESH, Phase.IDLE)
            if idlest is not None and now_s - idlest.since_s >= _IN_CONVERSATION_S:
                victim = idlest
        for phase in _EVICTABLE:
            victim = victim or self._longest(phase)
        if victim is not None:
            victim.expire(EVICTED)
        return victim is not None

    def _longest(self, *phases: Phase) -> Connection | None:
        """Who has been in one of these phases for longest."""
        oldest = [next(iter(self._phases[phase])) for phase in phases if self._phases[phase]]
        return min(oldest, key=lambda connection: connection.since_s, default=None)
