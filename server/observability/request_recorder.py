"""Records inference requests in the Prometheus metrics and in the statistics of the Open Inference Protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from multiworld_serving.common.metrics import guarded
from multiworld_serving.server.observability.inference_statistics import InferenceTimes, Statistics
from multiworld_serving.server.observability.metrics import Metrics
from multiworld_serving.server.observability.request_metrics import InferenceProtocol

_NOT_FOR_THE_MODEL = (404, 405)
MAX_VERSIONS = 8
"""Versions whose series are kept, as leaders keep the numbers of the latest eight."""


@dataclass(frozen=True)
class RequestOutcome:
    """The outcome of one inference request.

    Attributes:
        version: model version that answered, or would have.
        code: HTTP status; `CLIENT_CLOSED_REQUEST` if the client disconnected.
        reason: "ok", or the error's.
        times: None = no prediction.
        trace_id: None = it was not traced.
    """

    version: str
    protocol: InferenceProtocol
    code: int
    reason: str
    duration_s: float
    times: InferenceTimes | None
    trace_id: int | None = None


class RequestRecorder(Protocol):
    """Records requests, in this process or in another one."""

    def request_started(self, protocol: InferenceProtocol) -> int:
        """Record the start of an inference request; returns its number."""
        ...

    def request_ended(self, number: int, outcome: RequestOutcome) -> None:
        """Record the end of an inference request."""
        ...


class LocalRequestRecorder:
    """Records requests in this process. Its methods do not raise: a failure to record must not fail the request.

    Args:
        model: its name.
    """

    def __init__(self, model: str, metrics: Metrics, statistics: Statistics) -> None:
        self._model = model
        self._versions: list[str] = []
        """The latest last."""
        self._metrics = guarded(metrics)
        self._statistics = guarded(statistics)

    def request_started(self, protocol: InferenceProtocol) -> int:
        """See `RequestRecorder`. The number is always 0, since it is not needed here."""
        self._metrics.request_started()
        return 0

    def request_ended(self, number: int, outcome: RequestOutcome) -> None:
        """See `RequestRecorder`."""
        if self._versions[-1:] != [outcome.version]:
            self._use(outcome.version)
        times = outcome.times if outcome.code == 200 else None
        if outcome.code not in _NOT_FOR_THE_MODEL:
            self._statistics.request_finished(times, outcome.duration_s)
        self._metrics.request_finished(
            model=self._model,
            version=outcome.version,
            protocol=outcome.protocol,
            code=outcome.code,
            reason=outcome.reason,
            duration_s=outcome.duration_s,
            images=0 if times is None else len(times.images),
            trace_id=outcome.trace_id,
        )

    def _use(self, version: str) -> None:
        """Note that this version is the latest one, and remove the series of the version that was used longest ago."""
        if version in self._versions:
            self._versions.remove(version)
        else:
            self._metrics.version_answers(self._model, version)
        self._versions.append(version)
        if len(self._versions) > MAX_VERSIONS:
            self._metrics.requests_retired(self._model, self._versions.pop(0))
