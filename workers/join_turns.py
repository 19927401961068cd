"""What the connections of one worker tell each other about joining: whose turn it is, and which stages leaders have assigned.

Leaders place workers independently. So that they place this worker on the same stage, it asks one leader at a time, and tells the next
one which stage it got.
"""

import asyncio
import contextlib
from collections.abc import Iterator

from multiworld_serving.common.wire import MAX_PARTS
from multiworld_serving.models import BundleStageSpec

LONGEST_TURN_S = 2.0
"""How long a connection waits for its turn, and how long it keeps it at most. A leader that does not answer takes no turn."""


class JoinTurns:
    """Shared by the connections of one worker. Used on the event loop only."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._parts: dict[Joining, list[str]] = {}
        """Parts that leaders have assigned, by connection; see `BundleStageSpec.part`."""
        self._last_parts: list[str] = []

    @contextlib.contextmanager
    def joining(self) -> Iterator["Joining"]:
        """Covers one world with one leader, from join request to close."""
        one = Joining(self)
        try:
            yield one
        finally:
            one.end_turn()
            self._last_parts = self._parts.pop(one, self._last_parts)

    def assigned(self, one: "Joining", part: str) -> None:
        """A leader has assigned this part of the model."""
        parts = self._parts.setdefault(one, [])
        if part not in parts:
            parts.append(part)

    @property
    def hint(self) -> tuple[str, bool]:
        """`parts` and `is_shared` of a JoinRequest."""
        shared = sorted({part for parts in self._parts.values() for part in parts})
        return ",".join((shared or self._last_parts)[:MAX_PARTS]), bool(shared)

    async def acquire(self) -> bool:
        """Wait for the turn. Returns whether it was acquired in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_TURN_S):
                return await self._lock.acquire()
        return False

    def release(self) -> None:
        """End the turn."""
        self._lock.release()


class Joining:
    """See `JoinTurns.joining`."""

    def __init__(self, turns: JoinTurns) -> None:
        self._turns = turns
        self._ending: asyncio.TimerHandle | None = None
        """Set while it is this connection's turn."""

    async def begin_turn(self) -> tuple[str, bool]:
        """Wait for the turn, at most `LONGEST_TURN_S`. Returns the hint for the leader; see `JoinTurns.hint`."""
        if await self._turns.acquire():
            self._ending = asyncio.get_running_loop().call_later(LONGEST_TURN_S, self.end_turn)
        return self._turns.hint

    def assigned(self, spec: BundleStageSpec) -> None:
        """The leader has assigned a stage: the next connection may ask."""
        self._turns.assigned(self, spec.part)
        self.end_turn()

    def end_turn(self) -> None:
        """Let the next connection ask, if it is this one's turn."""
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
            self._turns.release()
