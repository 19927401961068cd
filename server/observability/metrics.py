"""The Prometheus metrics of leaders and frontends.

Callers report events (`world_broken`, `rerouted`); metric names, labels and buckets are defined only here and in request_metrics.py.
`replica` labels are slots and `world` labels are names without generation, so restarts do not add series.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from multiworld import Cause
from multiworld_serving.server.observability.request_metrics import RequestMetrics
from multiworld_serving.server.snapshots import ReplicaState, StageSnapshot

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
_STAGE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 10)  # hang_timeout_s: 10
_DETECTION_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 1.25, 1.5, 2, 5, 10, 15)  # heartbeat_timeout_s: 1
_REROUTE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15)  # recovery_grace_s: 15
_RECOVERY_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120)  # importing torch: 1.4; join_timeout_s: 60


@dataclass(frozen=True)
class Totals:
    """Counts of requests by outcome, and of batches that were sent again."""

    answered: int
    refused: int
    """Status 4xx: client error or overload."""
    failed: int
    """Status 5xx."""
    reroutes: dict[int, int]
    """Batches by stage."""


class Metrics(RequestMetrics):
    """All metrics of one leader or frontend. Thread-safe; a call costs about a microsecond."""

    def __init__(self, build: dict[str, str] | None = None) -> None:
        super().__init__(build)
        self._define_stages()
        self._define_failures()

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
        codes = self.statuses()
        reroutes = {int(stage): int(series.value) for (stage,), series in self._reroutes.items()}
        return Totals(codes["2"], codes["4"], codes["5"], reroutes)
