"""One record of each request over HTTP and gRPC. At its end the log, the metrics, the status page, the statistics and the trace read it."""

from __future__ import annotations

import logging
import math
import random
import re
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, get_args

from prometheus_client.metrics import MetricWrapperBase
from starlette.types import Scope

from multiworld_serving.common.metrics import ProgramMetrics
from multiworld_serving.common.observers import suppress_errors
from multiworld_serving.common.service.errors import STATUS_OF_REASON
from multiworld_serving.common.service.model_versions import Share
from multiworld_serving.common.service.predictor import Prediction, Trace
from multiworld_serving.server.frontend.observability.request_times import Times, duration, phases
from multiworld_serving.server.frontend.observability.tracing import RequestTraces

logger = logging.getLogger(__name__)

Family = TypeVar("Family", bound=MetricWrapperBase)

InferenceProtocol = Literal["predict", "v2", "grpc", "openai"]
"""The inference API of a request."""

ShadowOutcome = Literal["equal", "different", "failed", "incompatible", "dropped"]
"""Of a copy of a request: the results are equal or differ, or there are none, because the shadow failed, takes other inputs, or is busy."""

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected. Never sent; a label of the metrics."""
MAX_LOGGED_PER_S = 50
"""Lines in one second without `log_all`: an overloaded service rejects thousands of requests per second."""
MAX_VERSIONS = 8
"""Versions whose series are kept, as leaders keep the numbers of the latest eight."""
_MAX_RECENT = 10_000
_NOT_FOR_THE_MODEL = (404, 405)
_GIVEN_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SCOPE_KEY = "multiworld.request"
_OUTCOMES: Final = {"ok": 200, **STATUS_OF_REASON}

# Bucket bounds in seconds, dense around typical values and above the timeout that bounds the wait.
# fmt: off
_REQUEST_S = (
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 1, 2.5, 5, 10, 30, 60,  # timeout_s: 30
)
# fmt: on


@dataclass
class RequestRecord:
    """The record of one request: the routes complete it."""

    request_id: str
    version: str
    """Version of the model that answered; before that, the version that serves."""
    protocol: InferenceProtocol | None = None
    """None = it is not an inference request."""
    counts: ModelRequests | None = None
    """Of its model; None = the model is not known."""
    started_s: float = field(default_factory=time.monotonic)
    received_s: float = 0.0
    """When the body was complete, by `time.monotonic()`."""
    prediction: Prediction | None = None
    input_s: float = 0.0
    """Seconds to parse and decode the input."""
    predicted_s: float = 0.0
    """When the leaders had computed it, by `time.monotonic()`."""
    output_s: float = 0.0
    """Seconds to serialize the response."""
    reason: str = "ok"
    """Outcome: "ok", or the reason of the error."""
    status: int = CLIENT_CLOSED_REQUEST
    """Status of the response. The initial value remains if the task of the request is cancelled."""
    duration_s: float = 0.0
    """From the first byte of the request to the last byte of the response; 0 = not ended."""
    key_name: str = ""
    """Name of the key with which the request was authorized; empty if it needed none."""
    key_models: frozenset[str] | None = None
    """The models that this key permits; None = all."""
    id_is_generated: bool = True
    """Whether the id was generated, since the headers contain none."""
    span: Any = None
    """The recorded span of a traced request."""
    trace: Trace | None = None
    """Of a traced request, from its leader."""
    deadline_s: float = 0.0
    """By `time.monotonic()`; 0 = it was not sent to a leader."""

    def adopt_client_id(self, given: str) -> None:
        """Use the id in the request's body if it is short and printable and the headers contain none."""
        if self.id_is_generated and _GIVEN_ID.fullmatch(given):
            self.request_id, self.id_is_generated = given, False

    @classmethod
    def of(cls, scope: Scope) -> RequestRecord:
        """The record of this request."""
        record = scope[_SCOPE_KEY]
        assert isinstance(record, cls)
        return record


class RequestRecorder:
    """All requests of one frontend. For the event loop's thread only.

    Attributes:
        traces: None = no tracing.
        ended, images, duration, slow, copies, share: the metrics, which all models share.
        log_all: log all requests; False logs only the inference requests that failed or needed several attempts, at most
            `MAX_LOGGED_PER_S`.
    """

    def __init__(self, metrics: ProgramMetrics) -> None:
        self.traces: RequestTraces | None = None
        self.log_all = False
        self._second = self._logged = 0
        labels = ("model", "version", "protocol", "code", "reason")
        self.ended = metrics.counter("requests", "Inference requests completed, by outcome.", labels)
        self.images = metrics.counter("images", "Images in answered inference requests.", ("model", "version"))
        self.duration = metrics.histogram(
            "request_duration_seconds",
            "Time from the first byte of the request to the last byte of the response, by outcome.",
            _REQUEST_S,
            ("model", "protocol", "code"),
        )
        self.copies = metrics.counter(
            "shadow_requests", "Copies of requests for a version that is a shadow.", ("model", "outcome")
        )
        self.share = metrics.gauge(
            "model_share_percent", "Share of this version in the requests of its model; 0 for a shadow.", ("model",)
        )
        self.slow = metrics.counter(
            "requests_slow", "Answered requests that took longer than latency_objective_s.", ("model",)
        )
        self._unknown = ModelRequests("", self)
        self._in_flight = 0
        metrics.gauge("requests_in_flight", "Inference requests in flight.").set_function(lambda: self._in_flight)
        self._count = suppress_errors(self._count_outcome)
        self._log = suppress_errors(self._log_request)

    def of_model(self, name: str, slow_s: float = math.inf) -> ModelRequests:
        """New counts of the requests for a model. A response after more than `slow_s` is slow."""
        return ModelRequests(name, self, slow_s)

    def begin(
        self, scope: Scope, version: str, protocol: InferenceProtocol | None, counts: ModelRequests | None = None
    ) -> RequestRecord:
        """Create the record of a request. The caller completes it and calls `end` when the request has ended.

        Its id is the client's if that is short and printable, else a new one.

        Args:
            version: that serves now.
            protocol: None = not an inference request, which is logged only.
            counts: of its model; None = it does not exist, or is not known yet.
        """
        record = scope[_SCOPE_KEY] = RequestRecord(f"{random.getrandbits(128):032x}", version, protocol, counts)
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        record.adopt_client_id(given.decode("latin-1"))
        if protocol is not None:
            self._in_flight += 1
            if self.traces is not None:
                record.span = self.traces.begin(scope)
        return record

    def end(self, scope: Scope, record: RequestRecord) -> None:
        """Count, trace and log the request."""
        record.duration_s = time.monotonic() - record.started_s
        if record.protocol is not None:
            if record.status == CLIENT_CLOSED_REQUEST:
                record.reason = "cancelled"
            self._count(record)
            if self.traces is not None and record.span is not None:
                _end_span(self.traces, scope, record)
        attempts = 0 if record.prediction is None else record.prediction.attempts
        if self.log_all or (record.protocol is not None and (record.status >= 400 or attempts > 1)):
            self._log(scope, record)

    # The log

    def _log_request(self, scope: Scope, record: RequestRecord) -> None:
        """Its fields are `extra` fields of the log record, so that no client can forge one."""
        if not self.log_all and not self._may_log():
            return
        fields: dict[str, object] = {
            "request_id": record.request_id,
            "method": scope["method"],
            "target": scope["path"][:256],
            "status": record.status,
            "reason": record.reason,
            "ms": round(record.duration_s * 1e3, 3),
            "model": "" if record.counts is None else record.counts.model,
            "version": record.version,
        }
        if record.prediction is not None:
            fields |= {"path": ",".join(record.prediction.path), "attempts": record.prediction.attempts}
        if record.key_name:
            fields["key"] = record.key_name
        logger.log(logging.WARNING if record.status >= 500 else logging.INFO, "request", extra=fields)

    def _may_log(self) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            if (left_out := self._logged - MAX_LOGGED_PER_S) > 0:
                logger.warning(
                    "more failed or repeated requests than are logged; --access-log logs all left_out=%d", left_out
                )
            self._second, self._logged = second, 0
        self._logged += 1
        return self._logged <= MAX_LOGGED_PER_S

    def _count_outcome(self, record: RequestRecord) -> None:
        self._in_flight -= 1
        (record.counts or self._unknown).add(record)


class ModelRequests:
    """The requests for one model of a frontend.

    Attributes:
        model: its name; "" = not known yet.
    """

    def __init__(self, model: str, families: RequestRecorder, slow_s: float = math.inf) -> None:
        self.model = model
        self._slow_s = slow_s
        self._families = families
        self._protocols: Sequence[InferenceProtocol] = ()
        self._versions: list[str] = []
        """Those with series; the latest last."""
        self._recent: deque[tuple[int, float]] = deque(maxlen=_MAX_RECENT)
        self._last_unix_s = 0.0
        self._inferences = 0
        self._success, self._fail = Times(), Times()
        self._batches = defaultdict[int, Times](Times)
        """By size."""
        self._children: dict[tuple[object, ...], Any] = {}
        """Series by family and labels: looking up labels takes longer than counting."""

    def declare(self, model: str, version: str, protocols: Sequence[InferenceProtocol]) -> None:
        """Create the series of the possible outcomes with value 0, so that the first one is an increase."""
        self.model, self._protocols = model, protocols
        self._families.slow.labels(model)
        self._children.clear()
        self._use(version)

    def add(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        code, duration_s = record.status, record.duration_s
        self._use(record.version)
        self._child(self._families.ended, record.version, record.protocol, code, record.reason).inc()
        self._child(self._families.duration, record.protocol, code).observe(duration_s)
        self._recent.append((code, duration_s))
        if code not in _NOT_FOR_THE_MODEL:
            self._last_unix_s = time.time()
            times = self._success if code == 200 else self._fail
            times.count += 1
            times.total_s += duration_s
            if code == 200 and duration_s > self._slow_s:
                self._families.slow.labels(self.model).inc()
            if code == 200 and record.prediction is not None:
                self._add_prediction(record, record.prediction)

    def set_share(self, share: Share) -> None:
        """Note the share of this version. The outcomes of a shadow get series with value 0."""
        if not isinstance(share, str):
            self._families.share.labels(self.model).set(share)
            return
        self._families.share.labels(self.model).set(0)
        for outcome in get_args(ShadowOutcome):
            self._families.copies.labels(self.model, outcome)

    def count_copy(self, outcome: ShadowOutcome, ended: tuple[int, float] | None = None) -> None:
        """Count a copy of a request, and show its status and its duration in seconds on the status page."""
        self._families.copies.labels(self.model, outcome).inc()
        if ended is not None:
            self._recent.append(ended)

    def _child(self, family: Family, *labels: object) -> Family:
        found = self._children.get((family, *labels))
        if found is None:
            found = self._children[family, *labels] = family.labels(self.model, *labels)
        return found

    def _add_prediction(self, record: RequestRecord, prediction: Prediction) -> None:
        images = prediction.output.shape[0]
        self._inferences += images
        self._child(self._families.images, record.version).inc(images)
        share, batch = images / prediction.batch_size, self._batches[prediction.batch_size]
        batch.count += share
        batch.input_s += prediction.transfer_s * share
        batch.compute_s += prediction.compute_s * share
        batch.output_s += record.output_s
        self._success.queue_s += prediction.queue_s
        self._success.input_s += record.input_s + prediction.transfer_s
        self._success.compute_s += prediction.compute_s
        self._success.output_s += record.output_s

    def _use(self, version: str) -> None:
        """Note that this version is the latest one, and remove the series of the version that was used longest ago."""
        versions = self._versions
        if versions and versions[-1] == version:
            return
        if version in versions:
            versions.remove(version)
            versions.append(version)
            return
        versions.append(version)
        self._families.images.labels(self.model, version)
        for protocol in self._protocols:
            self._families.duration.labels(self.model, protocol, 200)
            for reason, code in _OUTCOMES.items():
                self._families.ended.labels(self.model, version, protocol, code, reason)
        if len(versions) > MAX_VERSIONS:
            former = {"model": self.model, "version": versions.pop(0)}
            self._families.images.remove_by_labels(former)
            self._families.ended.remove_by_labels(former)
            self._children.clear()

    # For the status page

    def take_recent(self) -> list[tuple[int, float]]:
        """Status and duration in seconds of the requests that have ended since the last call, at most the latest 10,000. For one caller."""
        taken = list(self._recent)
        self._recent.clear()
        return taken

    # For the Open Inference Protocol

    def statistics(self, version: str) -> dict[str, Any]:
        """One element of `model_stats`: sums since the start, over all versions."""
        success = self._success
        return {
            "name": self.model,
            "version": version,
            "last_inference": round(self._last_unix_s * 1e3),
            "inference_count": self._inferences,
            "execution_count": round(sum(batches.count for batches in self._batches.values())),
            "inference_stats": {
                "success": duration(success.count, success.total_s),
                "fail": duration(self._fail.count, self._fail.total_s),
                "queue": duration(success.count, success.queue_s),
                **phases(success, success.count),
                "cache_hit": duration(0, 0),
                "cache_miss": duration(0, 0),
            },
            "response_stats": {},
            "batch_stats": [
                {"batch_size": size, **phases(batches, batches.count * size)}
                for size, batches in sorted(self._batches.items())
            ],
            "memory_usage": [],
        }


@suppress_errors
def _end_span(traces: RequestTraces, scope: Scope, record: RequestRecord) -> None:
    """End the span of a request. The record provides its attributes."""
    attributes: dict[str, object] = {
        "http.request.method": scope["method"],
        "url.path": scope["path"][:256],
        "http.response.status_code": record.status,
        "multiworld.request_id": record.request_id,
        "multiworld.model": "" if record.counts is None else record.counts.model,
        "multiworld.version": record.version,
        "multiworld.reason": record.reason,
    }
    if (found := record.prediction) is not None:
        attributes |= {
            "multiworld.images": len(found.output),
            "multiworld.attempts": found.attempts,
            "multiworld.path": ",".join(found.path),
            "multiworld.decode_s": record.input_s,
            "multiworld.queue_s": found.queue_s,
            "multiworld.compute_s": found.compute_s,
            "multiworld.transfer_s": found.transfer_s,
        }
    if record.trace is not None:
        traces.add_trace(record.span, record.trace, record.deadline_s - record.trace.deadline_s)
    traces.end(record.span, attributes, record.reason if record.status >= 500 else "")
