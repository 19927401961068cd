"""What Prometheus is told, in the words of this project.

Callers say what happened (`world_broken`, `rerouted`); names, labels and buckets are chosen here alone. Every `replica`
label is a slot and every `world` label is a name without its epoch, so ten thousand restarts add no series.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from metrics import ProgramMetrics
from server.connections import CLOSING_REASONS
from server.predictor import ModelVersion, ReplicaState, StageSnapshot

Protocol = Literal["predict", "v2"]
"""Which of the inference interfaces a request came through."""
HedgeOutcome = Literal["won", "lost", "wasted"]
"""The second copy answered first, the first copy did, or the second one failed or was not wanted any more."""

HEDGE_OUTCOMES: tuple[HedgeOutcome, ...] = get_args(HedgeOutcome)
Direction = Literal["sent", "received"]
"""Of bytes on a link, as the leader sees them."""
_DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
CAUSES = ("exit", "hang", "transport", "error", "left", "timeout", "aborted")
"""Of a world's failure; a cause that is not among them is counted all the same."""
_REPLICA_STATES: tuple[str, ...] = get_args(ReplicaState)

# Edges in seconds. Each set is dense where its usual values lie and reaches past the timeout that ends the wait.
_REQUEST_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)  # timeout_s: 30
_QUEUE_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 30)  # batch_timeout_s: 0.002
_STAGE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 10)  # hang_timeout_s: 10
_DETECTION_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 1.25, 1.5, 2, 5, 10)  # heartbeat_timeout_s: 1
_REROUTE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15)  # recovery_grace_s: 15
_RECOVERY_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120)  # importing torch: 1.4; join_timeout_s: 60
_BATCH_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)


_MOST_LATEST = 10_000


@dataclass(frozen=True)
class Totals:
    """Requests by outcome, and batches rerouted by stage."""

    answered: int
    refused: int
    """4xx: a client's fault, or too much load."""
    failed: int
    reroutes: dict[int, int]


class Metrics(ProgramMetrics):
    """All series of one leader. Thread-safe; calls cost about a microsecond."""

    def __init__(self, build: dict[str, str] | None = None) -> None:
        super().__init__(build)
        self._latest: deque[float] = deque(maxlen=_MOST_LATEST)
        self._protocols: Sequence[Protocol] = ()
        self._codes: Mapping[str, int] = {}
        self._version: tuple[str, int] | None = None
        self._define_requests()
        self._define_versions()
        self._define_stages()
        self._define_failures()

    def _define_requests(self) -> None:
        self._requests = self._counter(
            "requests", "Inference requests that ended, by outcome.", ("model", "version", "protocol", "code", "reason")
        )
        self._request_duration = self._histogram(
            "request_duration_seconds",
            "From the request's first byte of HTTP to its answer's last, by outcome.",
            _REQUEST_S,
            ("protocol", "code"),
        )
        self._connections = self._gauge("http_connections", "Connections to the HTTP API that are open.").labels()
        self._connections_closed = self._counter(
            "http_connections_closed", "Connections closed for what their clients did or did not do.", ("reason",)
        )
        for reason in CLOSING_REASONS:
            self._connections_closed.labels(reason)
        self._frontends = self._gauge(
            "frontends", "Processes that answer HTTP beside the leader, where there are."
        ).labels()
        self._frontend_restarts = self._counter(
            "frontend_restarts", "Frontends started again by the supervisor.", ("slot",)
        )
        self._requests_in_flight = self._gauge("requests_in_flight", "Inference requests begun and not ended.").labels()
        self._queue_depth = self._gauge("queue_depth", "Images accepted by the leader and not in flight.").labels()
        self._queue_limit = self._gauge("queue_limit", "Images waiting at which requests are refused.").labels()
        self._queue_duration = self._histogram(
            "queue_duration_seconds", "Time an image waited in the leader before its batch was sent.", _QUEUE_S
        ).labels()
        self._batch_size = self._histogram(
            "batch_size", "Images in a batch when it was formed.", _BATCH_REQUESTS
        ).labels()
        self._lost = self._counter(
            "requests_lost", "Requests that got neither answer nor error in time: a bug."
        ).labels()
        self._duplicates = self._counter(
            "duplicate_answers", "Answers dropped because the request had one: late or hedged batches."
        ).labels()

    def _define_versions(self) -> None:
        self._version_info = self._gauge(
            "model_version",
            "1 for the version that new requests go to, 0 for those before it.",
            ("model", "version", "number"),
        )
        self._version_changes = self._counter(
            "version_changes", "How often new requests were moved to another version."
        ).labels()

    def _define_stages(self) -> None:
        self._stage_duration = self._histogram(
            "stage_duration_seconds",
            "Time of one batch on one link, by phase.",
            _STAGE_S,
            ("stage", "replica", "phase"),
        )
        self._link_bytes = self._counter(
            "link_bytes", "Bytes of batches on a link; sent is from the leader.", ("stage", "replica", "direction")
        )
        self._replica_in_flight = self._gauge(
            "replica_in_flight", "Batches sent to a replica and not answered.", ("stage", "replica")
        )
        self._stage_replicas = self._gauge("stage_replicas", "Replicas of a stage, by state.", ("stage", "state"))
        self._redundancy = self._gauge(
            "redundancy", "Fewest ready replicas of any stage, minus one; -1 means that it does not serve."
        ).labels()
        self._spares = self._gauge("spares", "Workers that hold all stages ready and serve none.").labels()
        self._kept_away = self._gauge(
            "workers_kept_away", "Workers that fail again and again and may not join now."
        ).labels()
        self._world_up = self._gauge("world_up", "1 while the link's world is ready.", ("world", "stage", "replica"))

    def _define_failures(self) -> None:
        self._world_failures = self._counter(
            "world_failures", "Worlds that broke, by cause.", ("stage", "replica", "cause")
        )
        self._detection = self._histogram(
            "failure_detection_seconds", "From the last sign of life to the break.", _DETECTION_S, ("cause",)
        )
        self._reroute_duration = self._histogram(
            "reroute_seconds", "From a break to its batch being sent to another replica.", _REROUTE_S
        ).labels()
        self._recovery = self._histogram(
            "recovery_seconds", "From a break until the slot served again.", _RECOVERY_S, ("cause",)
        )
        self._reroutes = self._counter("reroutes", "Batches moved to another replica after a break.", ("stage",))
        self._retries = self._counter("retries", "Batches sent again, for whatever reason.", ("stage",))
        self._hedges = self._counter("hedges", "Late batches sent to a second replica, by outcome.", ("outcome",))
        # A series that is born with its first event has no increase for Prometheus to see: these are there before.
        for outcome in HEDGE_OUTCOMES:
            self._hedges.labels(outcome)
        for cause in CAUSES:
            self._detection.labels(cause)
            self._recovery.labels(cause)
        self._restarts = self._counter("worker_restarts", "Workers started again by the supervisor.", ("slot",))

    # Requests

    def outcomes(self, model: str, version: str, protocols: Sequence[Protocol], codes: Mapping[str, int]) -> None:
        """These may come: show them as 0 before they do, so that the first one is an increase.

        Args:
            codes: HTTP status by reason, that of success included.
        """
        self._protocols, self._codes = protocols, codes
        for protocol in protocols:
            for reason, code in codes.items():
                self._requests.labels(model, version, protocol, code, reason)
            self._request_duration.labels(protocol, 200)

    def version_serves(self, model: str, version: ModelVersion) -> None:
        """Requests go to that version from now on."""
        if self._version is not None:
            self._version_info.labels(model, *self._version).set(0)
            self._version_changes.inc()
            self.outcomes(model, version.name, self._protocols, self._codes)
        self._version = (version.name, version.number)
        self._version_info.labels(model, *self._version).set(1)

    def connections(self, count: int) -> None:
        """So many connections to the HTTP API are open."""
        self._connections.set(count)

    def connection_closed(self, reason: str) -> None:
        """A connection was closed for what its client did: "head" came too late, "malformed", "evicted", …"""
        self._connections_closed.labels(reason).inc()

    def frontends(self, count: int) -> None:
        """So many processes answer HTTP beside the leader."""
        self._frontends.set(count)

    def frontend_slots(self, count: int) -> None:
        """So many there are to be."""
        for slot in range(count):
            self._frontend_restarts.labels(str(slot))

    def frontend_restarted(self, slot: str) -> None:
        """The supervisor started a frontend again."""
        self._frontend_restarts.labels(slot).inc()

    def request_started(self) -> None:
        """An inference request has come in."""
        self._requests_in_flight.inc()

    def request_finished(
        self, *, model: str, version: str, protocol: Protocol, code: int, reason: str, duration_s: float
    ) -> None:
        """It has ended, whatever way; `reason` is "ok" or the refusal's."""
        self._requests_in_flight.dec()
        self._requests.labels(model, version, protocol, code, reason).inc()
        if code == 200:
            self._latest.append(duration_s)
        self._request_duration.labels(protocol, code).observe(duration_s)

    def queue_depth(self, images: int) -> None:
        """So many images are accepted and not in flight."""
        self._queue_depth.set(images)

    def queue_limit(self, images: int) -> None:
        """With so many waiting, requests are refused."""
        self._queue_limit.set(images)

    def queued(self, seconds: float) -> None:
        """An image waited this long before its batch was sent."""
        self._queue_duration.observe(seconds)

    def batch_formed(self, images: int) -> None:
        """A batch of so many images was formed."""
        self._batch_size.observe(images)

    def request_lost(self) -> None:
        """A request was left with neither answer nor error: our invariant broke."""
        self._lost.inc()

    def duplicate_answer(self) -> None:
        """An answer came for a request that had one, and was dropped."""
        self._duplicates.inc()

    # Stages and worlds

    def batch_sent(self, stage: int, replica: int, payload_bytes: int) -> None:
        """A batch of so many bytes went to a replica."""
        self._replica_in_flight.labels(stage, replica).inc()
        self._link_bytes.labels(stage, replica, "sent").inc(payload_bytes)

    def batch_answered(
        self, stage: int, replica: int, *, compute_s: float, transfer_s: float, payload_bytes: int
    ) -> None:
        """A replica answered a batch with so many bytes: seconds it computed, and seconds on the link both ways."""
        self._replica_in_flight.labels(stage, replica).dec()
        self._link_bytes.labels(stage, replica, "received").inc(payload_bytes)
        self._stage_duration.labels(stage, replica, "compute").observe(compute_s)
        self._stage_duration.labels(stage, replica, "transfer").observe(transfer_s)

    def batch_failed(self, stage: int, replica: int) -> None:
        """A replica raised on a batch."""
        self._replica_in_flight.labels(stage, replica).dec()

    def world_ready(self, world: str, stage: int, replica: int) -> None:
        """A link serves. `world` is the name without the epoch."""
        self._world_up.labels(world, stage, replica).set(1)
        self._replica_in_flight.labels(stage, replica).set(0)
        for direction in _DIRECTIONS:
            self._link_bytes.labels(stage, replica, direction)
        for cause in CAUSES:
            self._world_failures.labels(stage, replica, cause)

    def world_closed(self, world: str, stage: int, replica: int) -> None:
        """A link ended on purpose."""
        self._world_up.labels(world, stage, replica).set(0)
        self._replica_in_flight.labels(stage, replica).set(0)

    def world_broken(
        self, world: str, stage: int, replica: int, *, cause: str, detected_after_s: float | None = None
    ) -> None:
        """A link failed; `detected_after_s` runs from the last sign of life, None when that is not known."""
        self._world_up.labels(world, stage, replica).set(0)
        self._replica_in_flight.labels(stage, replica).set(0)
        self._world_failures.labels(stage, replica, cause).inc()
        if detected_after_s is not None:
            self._detection.labels(cause).observe(detected_after_s)

    def world_recovered(self, *, cause: str, seconds: float) -> None:
        """A slot serves again so long after its world broke by that cause."""
        self._recovery.labels(cause).observe(seconds)

    def replica_states(self, stages: Sequence[StageSnapshot]) -> None:
        """How the replicas of all stages stand now; redundancy follows from it."""
        for stage in stages:
            tally: Tally[str] = Tally(replica.state for replica in stage.replicas)
            for state in _REPLICA_STATES:
                self._stage_replicas.labels(stage.index, state).set(tally[state])
            self._reroutes.labels(stage.index)
            self._retries.labels(stage.index)
        self._redundancy.set(min((stage.ready_replicas for stage in stages), default=0) - 1)

    def spares(self, spares: int, kept_away: int) -> None:
        """So many spares there are, and so many workers the circuit breaker keeps away."""
        self._spares.set(spares)
        self._kept_away.set(kept_away)

    # Failures survived

    def rerouted(self, stage: int, seconds: float) -> None:
        """A batch that a break left behind went to another replica, so long after the break."""
        self._reroutes.labels(stage).inc()
        self._reroute_duration.observe(seconds)

    def retried(self, stage: int) -> None:
        """A batch was sent again."""
        self._retries.labels(stage).inc()

    def hedged(self, outcome: HedgeOutcome) -> None:
        """A batch that was sent twice has ended."""
        self._hedges.labels(outcome).inc()

    def worker_restarted(self, slot: str) -> None:
        """The supervisor started a worker again; `slot` is its place, such as "stage0-1", not its process."""
        self._restarts.labels(slot).inc()

    # For the status page

    def totals(self) -> Totals:
        """What was counted since the start."""
        codes: Tally[str] = Tally()
        for (_, _, _, code, _), series in self._requests.items():
            codes[code[0]] += int(series.value)
        reroutes = {int(stage): int(series.value) for (stage,), series in self._reroutes.items()}
        return Totals(codes["2"], codes["4"], codes["5"], reroutes)

    def take_latest(self) -> list[float]:
        """How many seconds each answer took since this was asked last. For one caller; of a long time, the latest."""
        return [self._latest.popleft() for _ in range(len(self._latest))]
