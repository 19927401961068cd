"""Prometheus metrics of a worker: what the leader cannot measure from its end of the link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from multiworld import Cause
from multiworld_serving.common.metrics import ProgramMetrics

Outcome = Literal["answered", "failed", "input_lost", "discarded"]
"""Outcome of a batch: computed and sent or kept, its stage raised, its input could not be fetched, or its world ended before its result
was sent."""
_OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

# Bucket bounds in seconds, equal to the leader's multiworld_stage_duration_seconds so that both can be compared.
_COMPUTE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 10)

GPU_READINGS = {
    "gpu_utilization_ratio": "Share of the last sample period in which the GPU was busy, for any process.",
    "gpu_memory_used_bytes": "Memory of the GPU in use, by any process.",
    "gpu_memory_total_bytes": "Memory of the GPU.",
    "gpu_temperature_celsius": "Temperature of the GPU.",
    "gpu_power_watts": "Power draw of the GPU.",
}
"""GPU metrics and their help texts."""


class WorkerMetrics(ProgramMetrics):
    """All series of one worker. Thread-safe; calls cost about a microsecond."""

    def __init__(self, build: dict[str, str] | None = None) -> None:
        super().__init__(build)
        self._stages: set[int] = set()
        self._batches = self.counter(
            "worker_batches", "Batches finished at this worker, by outcome.", ("stage", "outcome")
        )
        self._compute = self.histogram("worker_compute_seconds", "Compute time of one batch.", _COMPUTE_S, ("stage",))
        self._busy = self.gauge("worker_busy", "1 while the worker computes, for any leader.").labels()
        self._loaded = self.gauge(
            "worker_stages_loaded", "Stages in the memory of this worker, each counted once for all leaders."
        ).labels()
        self._leaders = self.gauge("worker_leaders_connected", "Leaders that this worker is connected to now.").labels()
        self._joined = self.counter("worker_worlds_joined", "Worlds that this worker joined.").labels()
        self._ended = self.counter("worker_worlds_ended", "Worlds of this worker that ended, by cause.", ("cause",))
        for cause in Cause:  # a series that is created by its first event has no increase()
            self._ended.labels(cause.value)
        self._gpu = {name: self.gauge(name, says, ("device",)) for name, says in GPU_READINGS.items()}

    def stage_loaded(self, stage: int) -> None:
        """Create the series of this stage, so that they start at 0."""
        self._stages.add(stage)
        self._compute.labels(stage)
        for outcome in _OUTCOMES:
            self._batches.labels(stage, outcome)

    def computed(self, stage: int, seconds: float) -> None:
        """Record the compute time of a batch."""
        self._compute.labels(stage).observe(seconds)

    def batch_ended(self, stage: int, outcome: Outcome) -> None:
        """Count a batch by outcome. Stages that were never loaded share one series, because a leader could send any number."""
        self._batches.labels(stage if stage in self._stages else "unknown", outcome).inc()

    def busy(self, computes: bool) -> None:
        """Set whether the worker computes now."""
        self._busy.set(int(computes))

    def stages(self, loaded: int) -> None:
        """Set the number of stages in memory."""
        self._loaded.set(loaded)

    def world_joined(self) -> None:
        """Count a world that was joined."""
        self._joined.inc()
        self._leaders.inc()

    def world_left(self) -> None:
        """Decrease the number of connected leaders."""
        self._leaders.dec()

    def world_ended(self, cause: str) -> None:
        """Count the end of a world; the cause is "left" when the leader closed it normally."""
        self._ended.labels(cause).inc()

    def gpu(self, device: str, readings: Mapping[str, float]) -> None:
        """Set the GPU metrics. A metric that is missing in `readings` has no series."""
        for name, family in self._gpu.items():
            if name in readings:
                family.labels(device).set(readings[name])
            else:
                family.clear()
