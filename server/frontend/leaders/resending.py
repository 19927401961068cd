"""What happens to a request that a leader has not answered."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from multiworld_serving.common.edges.edge import RowsLostError
from multiworld_serving.common.service.errors import (
    InputUnreachableError,
    NotReadyError,
    OverloadedError,
    PoisonError,
    RequestRejected,
)
from multiworld_serving.common.service.messages import Predict
from multiworld_serving.common.wire.link import LinkLostError
from multiworld_serving.server.frontend.leaders.link import LeaderLink
from multiworld_serving.server.frontend.leaders.order import LeaderOrder
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics

logger = logging.getLogger(__name__)

_MAX_LEADER_FAILURES = 2
"""Leaders that may fail with the same request before it is rejected as poison."""
_TRY_ELSEWHERE = frozenset({"overloaded", "no_replica", "not_ready", "draining"})

FAILURES = (RowsLostError, InputUnreachableError, LinkLostError, RequestRejected)
"""What `Resending.after` takes."""


class Resending:
    """Of one request. See the table in `pool`.

    Attributes:
        request: as it is sent next.
        rejected: the leaders that have rejected it.
        resent: how often it was sent again because it was lost.
        holders: number of leaders that may have put it into a batch.
    """

    def __init__(self, request: Predict, leaders: LeaderOrder, metrics: FrontendMetrics, model: str) -> None:
        self.request = request
        self.rejected: dict[LeaderLink, RequestRejected] = {}
        self.resent = 0
        self.holders = 0
        self._failures = 0
        self._leaders = leaders
        self._metrics = metrics
        self._model = model

    async def after(self, error: Exception, link: LeaderLink) -> bool:
        """The leader has not answered. Returns whether the request can be sent again, as soon as it can. Raises PoisonError."""
        self.holders -= isinstance(error, OverloadedError | NotReadyError)  # both are decided on arrival
        match error:
            case RowsLostError():
                logger.warning("request_id=%s the answer is lost: %s", self.request.request_id, error)
                self.resent += 1
                unreachable = next(iter(error.unreachable), None)
                self.request = msgspec.structs.replace(self.request, fetches=False, unreachable=unreachable)
                self._metrics.resubmitted(self._model, "answer_lost")
            case InputUnreachableError():
                link.relays = True
                self._metrics.resubmitted(self._model, "relay")
            case LinkLostError():
                self._failures += error.failed
                if self._failures >= _MAX_LEADER_FAILURES:
                    raise PoisonError(
                        f"{self._failures} leaders failed while they had this request; it is not sent to another one"
                    ) from error
                self.resent += 1
                self._metrics.resubmitted(
                    self._model, "failed" if error.failed else "silent" if link.is_silent else "left"
                )
                await asyncio.sleep(0)  # a link that sends nothing more may still have to notice its end
            case RequestRejected():
                if error.reason not in _TRY_ELSEWHERE or self.rejected:
                    return False
                self.rejected[link] = error
                if self._leaders.choose(self.rejected) is not None:
                    self._metrics.resubmitted(self._model, error.reason)
        return True
