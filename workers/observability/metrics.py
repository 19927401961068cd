"""Prometheus metrics of a worker: what the leader cannot measure from its end of the link."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from prometheus_client import Counter, Histogram

from multiworld import Cause
from multiworld_serving.common.metrics import ProgramMetrics

Outcome = Literal["answered", "failed", "input_lost", "discarded"]
"""Outcome of a batch: computed and sent or kept, its stage raised, its input could not be fetched, or its world ended before its result
was sent."""
_OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

# Bucket bounds in seconds, equal to the leader's multiworld_stage_duration_seconds so that both can be compared.
_COMPUTE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 10)


class WorkerMetrics(ProgramMetrics):
    """All series of one worker. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._of_stage: dict[int, tuple[Histogram, dict[Outcome, Counter]]] = {}
        """Looking up labels would cost more than the increment."""
        self._batches = self.counter(
            "worker_batches", "Batches finished at this worker, by outcome.", ("stage", "outcome")
        )
        self._compute_s = self.histogram("worker_compute_seconds", "Compute time of one batch.", _COMPUTE_S, ("stage",))
        self._busy = self.gauge("worker_busy", "1 while the worker computes.")
        self._loaded = self.gauge("worker_stages_loaded", "Stages in the memory of this worker.")
        self._leader = self.gauge("worker_leader_connected", "1 while this worker is connected to a leader.")
        self._joined = self.counter("worker_worlds_joined", "Worlds that this worker joined.")
        self._ended = self.counter("worker_worlds_ended", "Worlds of this worker that ended, by cause.", ("cause",))
        for cause in Cause:  # a series that is created by its first event has no increase()
            self._ended.labels(cause.value)

    def watch(self, busy: Callable[[], bool], stages: Callable[[], int]) -> None:
        """Export whether the worker computes and how many stages it has in memory. Both are called in each scrape, on any thread."""
        self._busy.set_function(busy)
        self._loaded.set_function(stages)

    def stage_loaded(self, stage: int) -> None:
        """Create the series of this stage, so that they start at 0."""
        batches = {outcome: self._batches.labels(stage, outcome) for outcome in _OUTCOMES}
        self._of_stage[stage] = (self._compute_s.labels(stage), batches)

    def computed(self, stage: int, seconds: float) -> None:
        """Record the compute time of a batch of a loaded stage."""
        self._of_stage[stage][0].observe(seconds)

    def batch_ended(self, stage: int, outcome: Outcome) -> None:
        """Count a batch by outcome. Stages that were never loaded share one series, because a leader could send any number."""
        if stage in self._of_stage:
            self._of_stage[stage][1][outcome].inc()
        else:
            self._batches.labels("unknown", outcome).inc()

    def world_joined(self) -> None:
        """Count a world that was joined."""
        self._joined.inc()
        self._leader.set(1)

    def world_left(self) -> None:
        """This worker has no leader now."""
        self._leader.set(0)

    def world_ended(self, cause: str) -> None:
        """Count the end of a world; the cause is "left" when the leader closed it normally."""
        self._ended.labels(cause).inc()
