"""What happens to a request that a leader has not answered."""

from __future__ import annotations

import asyncio
import logging
import time

from multiworld_serving.common.service.errors import (
    NotReadyError,
    OverloadedError,
    PoisonError,
    RequestRejected,
)
from multiworld_serving.common.wire.inputs import RowsLostError
from multiworld_serving.common.wire.link import LinkLostError
from multiworld_serving.server.frontend.leaders.link import LeaderLink
from multiworld_serving.server.frontend.leaders.order import LeaderOrder
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics

logger = logging.getLogger(__name__)

_MAX_LEADER_FAILURES = 2
"""Leaders that may fail with the same request before it is rejected as poison."""
_TRY_ELSEWHERE = frozenset({"overloaded", "no_replica", "not_ready", "draining"})

FAILURES = (RowsLostError, LinkLostError, RequestRejected)
"""What `Resending.after` takes."""


_FIRST_RELAYING_S, _LONGEST_RELAYING_S = 1.0, 256.0
_SOON_S = 10.0
"""Longer than a request needs to fail because its tensors cannot be fetched."""


class Relaying:
    """Decides whether new requests are relayed because tensors of earlier ones could not be fetched.

    If a worker has died, relaying the requests that it had is enough. If two processes cannot reach each other, every request would run
    twice. So new requests are relayed for a second, and four times as long if tensors are lost again soon after.
    """

    def __init__(self) -> None:
        self._lasts_s = _FIRST_RELAYING_S
        self._until_s = float("-inf")

    @property
    def active(self) -> bool:
        """Whether new requests are relayed now."""
        return time.monotonic() < self._until_s

    def lost(self, why: str) -> None:
        """Handle the loss of a tensor of a request that was not relayed."""
        now_s = time.monotonic()
        if now_s >= self._until_s:  # otherwise the request was sent before
            is_soon = now_s < self._until_s + _SOON_S
            self._lasts_s = min(4 * self._lasts_s, _LONGEST_RELAYING_S) if is_soon else _FIRST_RELAYING_S
            self._until_s = now_s + self._lasts_s
            logger.warning("new requests are relayed for %g s, because %s", self._lasts_s, why)


class Resending:
    """Of one request. See the table in `pool`.

    Attributes:
        relay: whether all tensors pass the leader.
        rejected: the leaders that have rejected it.
        resent: how often it was sent again because it was lost.
        holders: number of leaders that may have put it into a batch.
    """

    def __init__(self, leaders: LeaderOrder, relaying: Relaying, metrics: FrontendMetrics, model: str) -> None:
        self.relay = relaying.active
        self.rejected: dict[LeaderLink, RequestRejected] = {}
        self.resent = 0
        self.holders = 0
        self._failures = 0
        self._leaders = leaders
        self._relaying = relaying
        self._metrics = metrics
        self._model = model

    async def after(self, error: Exception, link: LeaderLink) -> bool:
        """The leader has not answered. Returns whether the request can be sent again, as soon as it can. Raises PoisonError."""
        self.holders -= isinstance(error, OverloadedError | NotReadyError)  # both are decided on arrival
        match error:
            case RowsLostError():
                if self.relay:
                    return False
                self.relay = True
                self.resent += 1
                self._relaying.lost(str(error))
                self._metrics.resubmitted(self._model, "relay")
            case LinkLostError():
                self._failures += error.failed
                if self._failures >= _MAX_LEADER_FAILURES:
                    raise PoisonError(
                        f"{self._failures} leaders failed while they had this request; it is not sent to another one"
                    ) from error
                self.resent += 1
                self.rejected.clear()  # the workers join one of the other leaders
                self._metrics.resubmitted(self._model, "failed" if error.failed else "left")
                await asyncio.sleep(0)  # a link that sends nothing more may still have to notice its end
            case RequestRejected():
                if error.reason not in _TRY_ELSEWHERE or self.rejected:
                    return False
                self.rejected[link] = error
                if self._leaders.choose(self.rejected) is not None:
                    self._metrics.resubmitted(self._model, error.reason)
        return True
