"""The accounts that are kept of requests: for Prometheus, and for the statistics of the Open Inference Protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from server.metrics import Metrics
from server.metrics import Protocol as InferenceProtocol
from server.v2.statistics import InferenceTimes, Statistics

_NOT_FOR_THE_MODEL = (404, 405)


@dataclass(frozen=True)
class RequestOutcome:
    """How one inference request ended.

    Attributes:
        version: of the model that answered, or would have.
        code: HTTP status; `CLIENT_GONE` where nobody was there to read it.
        reason: "ok", or the refusal's.
        times: of its answer; None where it got none.
    """

    version: str
    protocol: InferenceProtocol
    code: int
    reason: str
    duration_s: float
    times: InferenceTimes | None


class Accounts(Protocol):
    """Who keeps them, here or in another process."""

    def request_began(self, protocol: InferenceProtocol) -> int:
        """An inference request has come in; gives its number."""
        ...

    def request_ended(self, number: int, outcome: RequestOutcome) -> None:
        """It has ended, whatever way."""
        ...


class LocalAccounts:
    """Kept in this process.

    Args:
        model: its name.
    """

    def __init__(self, model: str, metrics: Metrics, statistics: Statistics) -> None:
        self._model = model
        self._metrics = metrics
        self._statistics = statistics

    def request_began(self, protocol: InferenceProtocol) -> int:
        """See `Accounts`. They need no numbers."""
        self._metrics.request_started()
        return 0

    def request_ended(self, number: int, outcome: RequestOutcome) -> None:
        """See `Accounts`."""
        if outcome.code not in _NOT_FOR_THE_MODEL:
            self._statistics.request_finished(outcome.times if outcome.code == 200 else None, outcome.duration_s)
        self._metrics.request_finished(
            model=self._model,
            version=outcome.version,
            protocol=outcome.protocol,
            code=outcome.code,
            reason=outcome.reason,
            duration_s=outcome.duration_s,
        )
