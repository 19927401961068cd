"""The Prometheus metrics of a leader.

Counters and histograms are incremented where things happen. What follows from the leader's state is derived in each scrape, by
`PipelineCollector`. `replica` labels are slots and `world` labels are names without generation, so restarts do not add series.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from multiworld import Cause
from multiworld_serving.common.metrics import ProgramMetrics
from multiworld_serving.common.service.snapshots import PipelineSnapshot, ReplicaState
from multiworld_serving.server.leader.scheduling.state import Counters

HedgeOutcome = Literal["won", "lost", "wasted"]
"""Which copy of a hedged batch answered first: won = the second, lost = the first; wasted = the second failed or was not needed."""

CAUSES = tuple(cause.value for cause in Cause)
"""Known causes of a world's failure; other causes are counted too."""

# Bucket bounds in seconds, dense around typical values and above the timeout that bounds the wait.
_QUEUE_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 30)  # batch_timeout_s: 0.002
_BATCH_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
_STAGE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 10)  # hang_timeout_s: 10
_DETECTION_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 1.25, 1.5, 2, 5, 10, 15)  # heartbeat_timeout_s: 1
_REROUTE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15)  # recovery_grace_s: 15
_RECOVERY_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 20, 30, 60, 120)  # importing torch: 1.4; join_timeout_s: 60


class LinkMetrics(NamedTuple):
    """The series of one slot. Looking up labels would cost more than the increment."""

    sent_bytes: Counter
    received_bytes: Counter
    compute_s: Histogram
    transfer_s: Histogram


class LeaderMetrics(ProgramMetrics):
    """The counters, gauges and histograms of a leader. `Counter` and the others are thread-safe.

    Attributes:
        link: returns the series of a slot, by its stage and replica.
    """

    def __init__(self) -> None:
        super().__init__()
        self.link = functools.cache(self._link)
        self._define_requests()
        self._define_stages()
        self._define_failures()

    def _define_requests(self) -> None:
        self.queue_limit = self.gauge("queue_limit", "Queue depth at which requests are rejected.")
        self.queue_s = self.histogram(
            "queue_duration_seconds", "Time that an image waited in the leader before its batch was sent.", _QUEUE_S
        )
        self.batch_size = self.histogram("batch_size", "Images per batch.", _BATCH_REQUESTS)
        self.lost = self.counter("requests_lost", "Requests that got neither a response nor an error in time: a bug.")
        self.duplicates = self.counter(
            "duplicate_answers", "Results dropped because the request had one already: late or hedged batches."
        )
        self.version_changes = self.counter("version_changes", "Switches of new requests to another version.")
        self.frontends = self.gauge("frontends", "Frontends that are connected to this leader.")

    def _define_stages(self) -> None:
        self._stage_s = self.histogram(
            "stage_duration_seconds",
            "Time of one batch on one link, by phase.",
            _STAGE_S,
            ("stage", "replica", "phase"),
        )
        self._link_bytes = self.counter(
            "link_bytes", "Bytes of batches on a link; sent is from the leader.", ("stage", "replica", "direction")
        )
        relayed = self.counter(
            "relayed_bytes",
            "Bytes of images, outputs of stages and predictions that passed this leader, by the process that sent them.",
            ("sender",),
        )
        self.relayed_from_frontends, self.relayed_from_workers = map(relayed.labels, ("frontend", "worker"))
        self.replicas_wanted = self.gauge(
            "replicas_wanted",
            "Replicas of a stage that the load of this leader needs; add those of all leaders and round up.",
            ("stage",),
        )
        self.quarantined = self.gauge(
            "workers_quarantined", "Workers quarantined by the circuit breaker after repeated failures."
        )

    def _define_failures(self) -> None:
        self._world_failures = self.counter(
            "world_failures", "World failures, by cause.", ("stage", "replica", "cause")
        )
        self._detection_s = self.histogram(
            "failure_detection_seconds", "Time from the last sign of life to the failure.", _DETECTION_S, ("cause",)
        )
        self.reroute_s = self.histogram(
            "reroute_seconds", "Time from a failure until its batch was sent to another replica.", _REROUTE_S
        )
        self.recovery_s = self.histogram(
            "recovery_seconds", "Time from a failure until the slot served again.", _RECOVERY_S, ("cause",)
        )
        for cause in CAUSES:  # Prometheus sees no increase if a series first appears with value 1
            self._detection_s.labels(cause)
            self.recovery_s.labels(cause)

    def _link(self, stage: int, replica: int) -> LinkMetrics:
        """Create the series of a slot, together with those of its failures."""
        for cause in CAUSES:
            self._world_failures.labels(stage, replica, cause)
        return LinkMetrics(
            self._link_bytes.labels(stage, replica, "sent"),
            self._link_bytes.labels(stage, replica, "received"),
            self._stage_s.labels(stage, replica, "compute"),
            self._stage_s.labels(stage, replica, "transfer"),
        )

    def world_broken(self, stage: int, replica: int, cause: str, detected_after_s: float | None) -> None:
        """A link failed. `detected_after_s` counts from the last sign of life; None = unknown."""
        self._world_failures.labels(stage, replica, cause).inc()
        if detected_after_s is not None:
            self._detection_s.labels(cause).observe(detected_after_s)


@dataclass(eq=False)
class PipelineCollector(Collector):
    """Derives the metrics of the pipeline from its snapshot, and from what the scheduler counts."""

    snapshot: Callable[[], PipelineSnapshot]
    counters: Counters

    def collect(self) -> Iterator[Metric]:
        """See `Collector`."""
        now = self.snapshot()
        yield _gauge("queue_depth", "Images accepted by the leader and not in flight.", value=now.queue_depth)
        says = "Smallest number of ready replicas of any stage, minus one; -1 = not serving."
        yield _gauge("redundancy", says, value=now.redundancy)
        yield _gauge("spares", "Spare workers: they hold all stages and serve none.", value=len(now.spares))
        version = _gauge("model_version", "1 for the version that serves new requests.", ("model", "version", "number"))
        version.add_metric((now.model, now.version, str(now.version_number)), 1)
        hedges = _counter("hedges", "Late batches sent to a second replica, by outcome.", ("outcome",))
        for outcome in get_args(HedgeOutcome):
            hedges.add_metric((outcome,), self.counters.hedges[outcome])
        reroutes = _counter("reroutes", "Batches sent to another replica because their replica was lost.", ("stage",))
        retries = _counter("retries", "Batches sent to another replica because the stage raised an error.", ("stage",))
        replicas = _gauge("stage_replicas", "Replicas of a stage, by state.", ("stage", "state"))
        in_flight = _gauge("replica_in_flight", "Batches in flight to a replica.", ("stage", "replica"))
        up = _gauge("world_up", "1 while the world of the link is ready.", ("world", "stage", "replica"))
        says = "1 for the worker that has the link, or had it last."
        workers = _gauge("world_worker", says, ("world", "worker", "host"))
        info = _gauge("stage_info", "1 for each stage: its class, or where the model is cut.", ("stage", "stage_name"))
        for stage in now.stages:
            index = str(stage.index)
            info.add_metric((index, stage.blocks[0]), 1)
            reroutes.add_metric((index,), self.counters.reroutes[stage.index])
            retries.add_metric((index,), self.counters.retries[stage.index])
            for state in get_args(ReplicaState):
                replicas.add_metric((index, state), sum(replica.state == state for replica in stage.replicas))
            for replica in stage.replicas:
                if replica.world is not None:
                    slot, world = str(replica.slot), f"s{index}.r{replica.slot}"
                    in_flight.add_metric((index, slot), replica.in_flight)
                    up.add_metric((world, index, slot), replica.state == "ready")
                    workers.add_metric((world, replica.worker or "", replica.host or ""), 1)
        yield from (version, hedges, reroutes, retries, replicas, in_flight, up, workers, info)


def _gauge(name: str, says: str, labels: Sequence[str] | None = None, value: float | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"multiworld_{name}", says, value, labels)


def _counter(name: str, says: str, labels: Sequence[str]) -> CounterMetricFamily:
    return CounterMetricFamily(f"multiworld_{name}", says, labels=labels)
