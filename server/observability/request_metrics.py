"""The Prometheus metrics of requests, HTTP connections and versions: the part of `Metrics` that clients notice."""

from __future__ import annotations

from collections import Counter as Tally
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from multiworld_serving.common.metrics import ProgramMetrics
from multiworld_serving.server.predictor import ModelVersion
from multiworld_serving.server.snapshots import ServiceState

InferenceProtocol = Literal["predict", "v2", "grpc"]
"""The inference API of a request."""

# Bucket bounds in seconds, dense around typical values and above the timeout that bounds the wait.
# fmt: off
_REQUEST_S = (
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 1, 2.5, 5, 10, 30, 60,  # timeout_s: 30
)
# fmt: on
_QUEUE_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 30)  # batch_timeout_s: 0.002
_BATCH_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
_MAX_DURATIONS = 10_000


class RequestMetrics(ProgramMetrics):
    """The metrics of requests, connections and versions."""

    def __init__(self, build: dict[str, str] | None = None) -> None:
        super().__init__(build)
        self._durations: deque[float] = deque(maxlen=_MAX_DURATIONS)
        self._protocols: Sequence[InferenceProtocol] = ()
        self._codes: Mapping[str, int] = {}
        self._version: tuple[str, int] | None = None
        self._retired: Tally[str] = Tally()
        """Requests of versions whose series were removed, by the first digit of the status."""
        self._define_requests()
        self._define_versions()

    def _define_requests(self) -> None:
        self._requests = self.counter(
            "requests", "Inference requests completed, by outcome.", ("model", "version", "protocol", "code", "reason")
        )
        self._request_duration = self.histogram(
            "request_duration_seconds",
            "Time from the first byte of the request to the last byte of the response, by outcome.",
            _REQUEST_S,
            ("model", "protocol", "code"),
        )
        self._images = self.counter("images", "Images in answered inference requests.", ("model", "version"))
        self._connections = self.gauge("http_connections", "Open connections to the HTTP API.").labels()
        self._frontends = self.gauge("frontends", "Frontends that are connected to this leader.").labels()
        self._leaders = self.gauge("leaders", "Leaders that this frontend can use.")
        self._service_state = self.gauge(
            "service_state", "1 for the state of the service as this frontend sees it, 0 for the others.", ("state",)
        )
        self._leaders_configured = self.gauge("leaders_configured", "Leaders that this frontend was told of.")
        self._resubmitted = self.counter(
            "requests_resubmitted",
            "Requests that a frontend sent to another leader, by reason: failed = the leader failed, left = it stopped; otherwise the "
            "reason of its rejection.",
            ("reason",),
        )
        for reason in ("failed", "left"):
            self._resubmitted.labels(reason)
        self._requests_in_flight = self.gauge("requests_in_flight", "Inference requests in flight.").labels()
        self._queue_depth = self.gauge("queue_depth", "Images accepted by the leader and not in flight.").labels()
        self._queue_limit = self.gauge("queue_limit", "Queue depth at which requests are rejected.").labels()
        self._queue_duration = self.histogram(
            "queue_duration_seconds", "Time that an image waited in the leader before its batch was sent.", _QUEUE_S
        ).labels()
        self._batch_size = self.histogram("batch_size", "Images per batch.", _BATCH_REQUESTS).labels()
        self._lost = self.counter(
            "requests_lost", "Requests that got neither a response nor an error in time: a bug."
        ).labels()
        self._duplicates = self.counter(
            "duplicate_answers", "Results dropped because the request had one already: late or hedged batches."
        ).labels()

    def _define_versions(self) -> None:
        self._version_info = self.gauge(
            "model_version",
            "1 for the version that serves new requests, 0 for recent earlier ones.",
            ("model", "version", "number"),
        )
        self._version_changes = self.counter("version_changes", "Switches of new requests to another version.").labels()

    def declare_outcomes(
        self, model: str, version: str, protocols: Sequence[InferenceProtocol], codes: Mapping[str, int]
    ) -> None:
        """Create the series of these outcomes with value 0, so that the first one is an increase.

        Args:
            codes: HTTP status by reason, including that of success.
        """
        self._protocols, self._codes = protocols, codes
        for protocol in protocols:
            for reason, code in codes.items():
                self._requests.labels(model, version, protocol, code, reason)
            self._request_duration.labels(model, protocol, 200)
            self._images.labels(model, version)

    def version_serves(self, model: str, version: ModelVersion) -> None:
        """New requests use this version from now on."""
        if self._version is not None:
            self._version_info.labels(model, *self._version).set(0)
            self._version_changes.inc()
            self.declare_outcomes(model, version.name, self._protocols, self._codes)
        self._version = (version.name, version.number)
        self._version_info.labels(model, *self._version).set(1)

    def version_retired(self, model: str, version: ModelVersion) -> None:
        """Remove the series of an earlier version. Its counts remain in `totals`."""
        self.requests_retired(model, version.name)
        self._version_info.remove(lambda values: values == (model, version.name, str(version.number)))

    def version_answers(self, model: str, version: str) -> None:
        """Create the series of the requests of this version with value 0, so that the first one is an increase."""
        self.declare_outcomes(model, version, self._protocols, self._codes)

    def requests_retired(self, model: str, version: str) -> None:
        """Remove the series of the requests of a version. Their counts remain in `totals`."""
        for (_, _, _, code, _), series in self._requests.remove(lambda values: values[:2] == (model, version)):
            self._retired[code[0]] += int(series.value)
        self._images.remove(lambda values: values == (model, version))

    def connections(self, count: int) -> None:
        """Set the number of open connections to the HTTP API."""
        self._connections.set(count)

    def frontends(self, count: int) -> None:
        """Set the number of frontends that serve."""
        self._frontends.set(count)

    def leaders(self, usable: int, configured: int) -> None:
        """Set the number of leaders that a frontend can use, and of those that it was told of."""
        self._leaders.labels().set(usable)
        self._leaders_configured.labels().set(configured)

    def service_state(self, current: ServiceState) -> None:
        """Set the state of the service, as a frontend sees it."""
        for state in get_args(ServiceState):
            self._service_state.labels(state).set(int(state == current))

    def resubmitted(self, reason: str) -> None:
        """A frontend sends a request to another leader."""
        self._resubmitted.labels(reason).inc()

    def request_started(self) -> None:
        """An inference request has started."""
        self._requests_in_flight.inc()

    def request_finished(
        self,
        *,
        model: str,
        version: str,
        protocol: InferenceProtocol,
        code: int,
        reason: str,
        duration_s: float,
        images: int = 0,
        trace_id: int | None = None,
    ) -> None:
        """An inference request has ended; `reason` is "ok" or the error's. `images` is the number that was answered."""
        self._requests_in_flight.dec()
        self._requests.labels(model, version, protocol, code, reason).inc()
        if code == 200:
            self._durations.append(duration_s)
        if images:
            self._images.labels(model, version).inc(images)
        self._request_duration.labels(model, protocol, code).observe(duration_s, trace_id)

    def queue_depth(self, images: int) -> None:
        """Set the number of images that are accepted and not in flight."""
        self._queue_depth.set(images)

    def queue_limit(self, images: int) -> None:
        """Set the queue depth at which requests are rejected."""
        self._queue_limit.set(images)

    def queued(self, seconds: float) -> None:
        """An image waited this long before its batch was sent."""
        self._queue_duration.observe(seconds)

    def batch_formed(self, images: int) -> None:
        """A batch of this many images was formed."""
        self._batch_size.observe(images)

    def request_lost(self) -> None:
        """A request got neither a response nor an error: a bug."""
        self._lost.inc()

    def duplicate_answer(self) -> None:
        """A result was dropped because the request had one already."""
        self._duplicates.inc()

    def statuses(self) -> Tally[str]:
        """The number of requests since the start, by the first digit of the status."""
        codes = self._retired.copy()
        for (_, _, _, code, _), series in self._requests.items():
            codes[code[0]] += int(series.value)
        return codes

    def take_durations(self) -> list[float]:
        """Durations in seconds of the responses since the last call, at most the latest 10,000. For one caller."""
        return [self._durations.popleft() for _ in range(len(self._durations))]
