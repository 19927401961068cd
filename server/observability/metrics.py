"""The Prometheus metrics of leaders and frontends.

Callers report events (`world_broken`, `rerouted`); metric names, labels and buckets are defined only here. `replica` labels
are slots and `world` labels are names without generation, so restarts do not add series.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from multiworld import Cause
from multiworld_serving.common.metrics import ProgramMetrics
from multiworld_serving.server.predictor import ModelVersion, ReplicaState, ServiceState, StageSnapshot

InferenceProtocol = Literal["predict", "v2", "grpc"]
"""The inference API of a request."""
HedgeOutcome = Literal["won", "lost", "wasted"]
"""Which copy of a hedged batch answered first: won = the second, lost = the first; wasted = the second failed or was not needed."""

HEDGE_OUTCOMES: tuple[HedgeOutcome, ...] = get_args(HedgeOutcome)
Direction = Literal["sent", "received"]
"""Direction of bytes on a link, from the leader's point of view."""
Sender = Literal["frontend", "worker"]
_DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
CAUSES = tuple(cause.value for cause in Cause)
"""Known causes of a world's failure; other causes are counted too."""
_REPLICA_STATES: tuple[str, ...] = get_args(ReplicaState)

# Bucket bounds in seconds, dense around typical values and above the timeout that bounds the wait.
_REQUEST_S = (
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.25,
    0.3,
    0.4,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
)  # timeout_s: 30
_QUEUE_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 30)  # batch_timeout_s: 0.002
_STAGE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 10)  # hang_timeout_s: 10
_DETECTION_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 1.25, 1.5, 2, 5, 10, 15)  # heartbeat_timeout_s: 1
_REROUTE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15)  # recovery_grace_s: 15
_RECOVERY_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120)  # importing torch: 1.4; join_timeout_s: 60
_BATCH_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)


_MAX_DURATIONS = 10_000


@dataclass(frozen=True)
class Totals:
    """Counts of requests by outcome, and of what was sent again."""

    answered: int
    refused: int
    """Status 4xx: client error or overload."""
    failed: int
    """Status 5xx."""
    resubmitted: int
    """Times that a frontend sent a request again."""
    reroutes: dict[int, int]
    """Batches by stage."""


class Metrics(ProgramMetrics):
    """All metrics of one leader or frontend. Thread-safe; a call costs about a microsecond."""

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
        self._define_stages()
        self._define_failures()

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
        self._connections_closed = self.counter(
            "http_connections_closed", "Connections closed because of their client, by reason.", ("reason",)
        )
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

    def _define_stages(self) -> None:
        self._stage_duration = self.histogram(
            "stage_duration_seconds",
            "Time of one batch on one link, by phase.",
            _STAGE_S,
            ("stage", "replica", "phase"),
        )
        self._link_bytes = self.counter(
            "link_bytes", "Bytes of batches on a link; sent is from the leader.", ("stage", "replica", "direction")
        )
        self._inputs_lost = self.counter(
            "inputs_lost", "Batches whose input a worker could not fetch, and whose images started again."
        ).labels()
        self._relayed = self.counter(
            "relayed_bytes",
            "Bytes of images, outputs of stages and predictions that passed this leader, by the process that sent them.",
            ("sender",),
        )
        for sender in get_args(Sender):
            self._relayed.labels(sender)
        self._replica_in_flight = self.gauge(
            "replica_in_flight", "Batches in flight to a replica.", ("stage", "replica")
        )
        self._stage_replicas = self.gauge("stage_replicas", "Replicas of a stage, by state.", ("stage", "state"))
        self._replicas_wanted = self.gauge(
            "replicas_wanted",
            "Replicas of a stage that the load of this leader needs; add those of all leaders and round up.",
            ("stage",),
        )
        self._redundancy = self.gauge(
            "redundancy", "Smallest number of ready replicas of any stage, minus one; -1 = not serving."
        )
        self._spares = self.gauge("spares", "Spare workers: they hold all stages and serve none.").labels()
        self._quarantined = self.gauge(
            "workers_quarantined", "Workers quarantined by the circuit breaker after repeated failures."
        ).labels()
        self._world_up = self.gauge(
            "world_up", "1 while the world of the link is ready.", ("world", "stage", "replica")
        )
        self._world_worker = self.gauge(
            "world_worker", "1 for the worker that has the link, or had it last.", ("world", "worker", "host")
        )

    def _define_failures(self) -> None:
        self._world_failures = self.counter(
            "world_failures", "World failures, by cause.", ("stage", "replica", "cause")
        )
        self._detection = self.histogram(
            "failure_detection_seconds", "Time from the last sign of life to the failure.", _DETECTION_S, ("cause",)
        )
        self._reroute_duration = self.histogram(
            "reroute_seconds", "Time from a failure until its batch was sent to another replica.", _REROUTE_S
        ).labels()
        self._recovery = self.histogram(
            "recovery_seconds", "Time from a failure until the slot served again.", _RECOVERY_S, ("cause",)
        )
        self._reroutes = self.counter(
            "reroutes", "Batches sent to another replica because their replica was lost.", ("stage",)
        )
        self._retries = self.counter(
            "retries", "Batches sent to another replica because the stage raised an error.", ("stage",)
        )
        self._hedges = self.counter("hedges", "Late batches sent to a second replica, by outcome.", ("outcome",))
        # Prometheus sees no increase if a series first appears with value 1: create these with 0.
        for outcome in HEDGE_OUTCOMES:
            self._hedges.labels(outcome)
        for cause in CAUSES:
            self._detection.labels(cause)
            self._recovery.labels(cause)

    # Requests

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

    def declare_closing_reasons(self, reasons: Iterable[str]) -> None:
        """Create the series of these reasons with value 0, so that the first closed connection is an increase."""
        for reason in reasons:
            self._connections_closed.labels(reason)

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

    def connection_closed(self, reason: str) -> None:
        """A connection was closed because of its client, such as "malformed" or "evicted"."""
        self._connections_closed.labels(reason).inc()

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
    ) -> None:
        """An inference request has ended; `reason` is "ok" or the error's. `images` is the number that was answered."""
        self._requests_in_flight.dec()
        self._requests.labels(model, version, protocol, code, reason).inc()
        if code == 200:
            self._durations.append(duration_s)
        if images:
            self._images.labels(model, version).inc(images)
        self._request_duration.labels(model, protocol, code).observe(duration_s)

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

    # Stages and worlds

    def batch_sent(self, stage: int, replica: int, payload_bytes: int) -> None:
        """A batch of this many bytes was sent to a replica."""
        self._replica_in_flight.labels(stage, replica).inc()
        self._link_bytes.labels(stage, replica, "sent").inc(payload_bytes)

    def batch_answered(
        self, stage: int, replica: int, *, compute_s: float, transfer_s: float, payload_bytes: int
    ) -> None:
        """A replica returned a batch: its compute time, the transfer time in both directions, and the bytes received."""
        self._replica_in_flight.labels(stage, replica).dec()
        self._link_bytes.labels(stage, replica, "received").inc(payload_bytes)
        self.relayed("worker", payload_bytes)
        self._stage_duration.labels(stage, replica, "compute").observe(compute_s)
        self._stage_duration.labels(stage, replica, "transfer").observe(transfer_s)

    def relayed(self, sender: Sender, nbytes: int) -> None:
        """A tensor of this size arrived at the leader, which passes it on."""
        self._relayed.labels(sender).inc(nbytes)

    def input_lost(self) -> None:
        """The input of a batch could not be fetched."""
        self._inputs_lost.inc()

    def batch_failed(self, stage: int, replica: int) -> None:
        """A replica raised an exception on a batch."""
        self._replica_in_flight.labels(stage, replica).dec()

    def world_ready(self, world: str, stage: int, replica: int) -> None:
        """A link serves. `world` is the name without generation."""
        self._world_up.labels(world, stage, replica).set(1)
        self._replica_in_flight.labels(stage, replica).set(0)
        for direction in _DIRECTIONS:
            self._link_bytes.labels(stage, replica, direction)
        for cause in CAUSES:
            self._world_failures.labels(stage, replica, cause)

    def world_worker(self, world: str, worker: str, host: str) -> None:
        """This worker has the link now. Its series replaces that of the former worker."""
        self._world_worker.remove(lambda values: values[0] == world and values[1:] != (worker, host))
        self._world_worker.labels(world, worker, host).set(1)

    def world_closed(self, world: str, stage: int, replica: int) -> None:
        """A link was closed deliberately."""
        self._world_up.labels(world, stage, replica).set(0)
        self._replica_in_flight.labels(stage, replica).set(0)

    def world_broken(
        self, world: str, stage: int, replica: int, *, cause: str, detected_after_s: float | None = None
    ) -> None:
        """A link failed. `detected_after_s` counts from the last sign of life; None = unknown."""
        self._world_up.labels(world, stage, replica).set(0)
        self._replica_in_flight.labels(stage, replica).set(0)
        self._world_failures.labels(stage, replica, cause).inc()
        if detected_after_s is not None:
            self._detection.labels(cause).observe(detected_after_s)

    def world_recovered(self, *, cause: str, seconds: float) -> None:
        """A slot serves again, this long after its world failed with this cause."""
        self._recovery.labels(cause).observe(seconds)

    def replica_states(self, stages: Sequence[StageSnapshot]) -> None:
        """Set the replica states of all stages, and the redundancy."""
        for stage in stages:
            tally: Tally[str] = Tally(replica.state for replica in stage.replicas)
            for state in _REPLICA_STATES:
                self._stage_replicas.labels(stage.index, state).set(tally[state])
            self._reroutes.labels(stage.index)
            self._retries.labels(stage.index)
        self._redundancy.labels().set(min((stage.ready_replicas for stage in stages), default=0) - 1)

    def replicas_wanted(self, wanted: Sequence[float]) -> None:
        """Set the replicas that the load of this leader needs, by stage."""
        for stage, replicas in enumerate(wanted):
            self._replicas_wanted.labels(stage).set(replicas)

    def spares(self, spares: int, quarantined: int) -> None:
        """Set the number of spares and of quarantined workers."""
        self._spares.set(spares)
        self._quarantined.set(quarantined)

    # Recovery

    def rerouted(self, stage: int, seconds: float) -> None:
        """A batch was sent to another replica, this long after the failure."""
        self._reroutes.labels(stage).inc()
        self._reroute_duration.observe(seconds)

    def retried(self, stage: int) -> None:
        """A batch was sent to another replica because the stage raised an error."""
        self._retries.labels(stage).inc()

    def hedged(self, outcome: HedgeOutcome) -> None:
        """A hedged batch has ended."""
        self._hedges.labels(outcome).inc()

    # For the status page

    def totals(self) -> Totals:
        """Counts since the start."""
        codes = self._retired.copy()
        for (_, _, _, code, _), series in self._requests.items():
            codes[code[0]] += int(series.value)
        reroutes = {int(stage): int(series.value) for (stage,), series in self._reroutes.items()}
        resubmitted = sum(int(series.value) for _, series in self._resubmitted.items())
        return Totals(codes["2"], codes["4"], codes["5"], resubmitted, reroutes)

    def take_durations(self) -> list[float]:
        """Durations in seconds of the responses since the last call, at most the latest 10,000. For one caller."""
        return [self._durations.popleft() for _ in range(len(self._durations))]
