"""Generates the tokens of one sequence. The frontend has the prompt and all tokens, so that no loss of another process loses one.

Each step is a request of the session, which goes to the replicas that keep it. If one of them is lost, a new session computes prompt and
tokens as one prefill. Workers compute a step only if the session has exactly the tokens before it, so none is skipped or computed twice.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any, NamedTuple

from multiworld_serving.common.service.errors import OverloadedError, SessionLostError, StageError
from multiworld_serving.models.generate.decoder import FULL, LOST
from multiworld_serving.server.frontend.api.streams import end_session, send_step
from multiworld_serving.server.frontend.http.open_request import OpenRequest
from multiworld_serving.server.frontend.leaders.pool import LeaderPool
from multiworld_serving.server.frontend.observability.metrics import ReplayCause

_MAX_REPLAYS = 20
"""Replays of a sequence without a token between them."""
_PAUSE_S = 0.05
_ROOM_S = 0.25
"""Pause between two attempts of a sequence that has tokens, if no worker has room for it."""


class Sampling(NamedTuple):
    """How tokens are chosen. `temperature` 0: the most probable one."""

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


class Generation:
    """One sequence.

    Args:
        prompt: its tokens.
        most: tokens to generate at most.
        on_replay: called when a session was lost.

    Attributes:
        capacity: tokens of the prompt and at most `most` more.
    """

    def __init__(
        self,
        pool: LeaderPool,
        opened: OpenRequest,
        prompt: list[int],
        most: int,
        sampling: Sampling,
        on_replay: Callable[[ReplayCause], None],
    ) -> None:
        self._pool = pool
        self._opened = opened
        self._tokens = list(prompt)
        self._prompt = len(prompt)
        self.capacity = len(prompt) + most
        self._sampling = sampling
        self._session = self._former = ""
        self._route: tuple[str, ...] = ()
        self._on_replay = on_replay

    async def tokens(self) -> AsyncGenerator[int, None]:
        """The tokens, as they are computed. Closing the iterator ends the session.

        Raises:
            OverloadedError: the workers have no room for another session. A sequence that has tokens waits for room.
            RequestRejected: the sequence cannot be computed.
        """
        failures = 0
        try:
            while len(self._tokens) < self.capacity:
                result = await self._attempt()
                if result == LOST:
                    failures += 1
                    if failures > _MAX_REPLAYS:
                        raise StageError(f"the session was lost {failures} times without a token in between")
                if result in (LOST, FULL):
                    self._former, self._session, self._route = self._session, "", ()
                    await asyncio.sleep(_ROOM_S if result == FULL else 0 if failures == 1 else _PAUSE_S)
                    continue
                if not isinstance(result, int):
                    raise StageError(f"the last stage returned {type(result).__name__}; expected a token")
                failures = 0
                self._tokens.append(result)
                self._opened.prolong()
                yield result
        finally:
            end_session(self._pool, {"end": self._session}, self._route)

    async def _attempt(self) -> Any:
        """The result of a step; LOST without a session, FULL without room. Raises OverloadedError if a new sequence has no room."""
        try:
            result = await self._step()
        except SessionLostError:
            self._on_replay("replica")
            return LOST
        except OverloadedError:
            if self._has_to_end():
                raise
            return FULL
        if result == LOST:
            self._on_replay("session")
        if result == FULL and self._has_to_end():
            raise OverloadedError("the workers have no room for the tokens of another sequence; try again later")
        return result

    def _has_to_end(self) -> bool:
        """Whether a sequence without room ends because it has no tokens yet, or no time to wait."""
        return len(self._tokens) == self._prompt or time.monotonic() + _ROOM_S > self._opened.deadline_s

    async def _step(self) -> Any:
        """The result of one step: of the last token, or of all tokens in a new session."""
        tokens, position, former = self._tokens[-1:], len(self._tokens) - 1, ""
        if not self._session:
            self._session, tokens, position, former = uuid.uuid4().hex, self._tokens, 0, self._former
        row = {
            "session": self._session,
            "replaces": former,
            "tokens": tokens,
            "position": position,
            "capacity": self.capacity,
            "sampling": [*self._sampling, len(self._tokens)],
        }
        found, prediction = await send_step(self._pool, self._opened, row, self._route)
        self._route = prediction.route
        return found.get("result") if isinstance(found, dict) else found
