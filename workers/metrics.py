"""What a worker tells Prometheus of itself: what the leader cannot see from its end of the link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from metrics import ProgramMetrics
from multiworld import Cause

Outcome = Literal["answered", "failed", "unwanted"]
"""Of a batch: computed and sent, its stage raised, or its world ended before the answer was out."""
_OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

# Edges in seconds, as those of the leader's multiworld_stage_duration_seconds: the two are to be compared.
_COMPUTE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 10)

GPU_READINGS = {
    "gpu_utilization_ratio": "Share of the last moments in which the GPU computed, for whomever.",
    "gpu_memory_used_bytes": "Memory of the GPU that is in use, by whomever.",
    "gpu_memory_total_bytes": "Memory of the GPU.",
    "gpu_temperature_celsius": "Temperature of the GPU.",
    "gpu_power_watts": "Power that the GPU draws.",
}
"""What is read of a GPU, and its sentence."""


class WorkerMetrics(ProgramMetrics):
    """All series of one worker. Thread-safe; calls cost about a microsecond."""

    def __init__(self, build: dict[str, str] | None = None) -> None:
        super().__init__(build)
        self._stages: set[int] = set()
        self._batches = self._counter(
            "worker_batches", "Batches that ended at this worker, by outcome.", ("stage", "outcome")
        )
        self._compute = self._histogram(
            "worker_compute_seconds", "Time that this worker computed on one batch.", _COMPUTE_S, ("stage",)
        )
        self._busy = self._gauge("worker_busy", "1 while it computes, for whichever leader.").labels()
        self._leaders = self._gauge("worker_leaders_connected", "Leaders that it shares a world with now.").labels()
        self._joined = self._counter("worker_worlds_joined", "Worlds that it came to be a member of.").labels()
        self._ended = self._counter("worker_worlds_ended", "Worlds that ended under it, by cause.", ("cause",))
        for cause in Cause:  # a series that is born with its first event has no increase
            self._ended.labels(cause.value)
        self._gpu = {name: self._gauge(name, says, ("device",)) for name, says in GPU_READINGS.items()}

    def stage_loaded(self, stage: int) -> None:
        """It can compute that stage from now on: its batches show as 0 before the first."""
        self._stages.add(stage)
        self._compute.labels(stage)
        for outcome in _OUTCOMES:
            self._batches.labels(stage, outcome)

    def computed(self, stage: int, seconds: float) -> None:
        """It computed so long on a batch."""
        self._compute.labels(stage).observe(seconds)

    def batch_ended(self, stage: int, outcome: Outcome) -> None:
        """What came of a batch. A stage that was never loaded is what a leader made up: all of those are one series."""
        self._batches.labels(stage if stage in self._stages else "unknown", outcome).inc()

    def busy(self, computes: bool) -> None:
        """Whether it computes now."""
        self._busy.set(int(computes))

    def world_joined(self) -> None:
        """It is member of one world more."""
        self._joined.inc()
        self._leaders.inc()

    def world_gone(self) -> None:
        """It is member of one world less."""
        self._leaders.dec()

    def world_ended(self, cause: str) -> None:
        """A world ended by that cause; "left" is the leader's goodbye."""
        self._ended.labels(cause).inc()

    def gpu(self, device: str, readings: Mapping[str, float]) -> None:
        """What was read of its GPU last; what is not among the `readings` is not known, and has no series."""
        for name, family in self._gpu.items():
            if name in readings:
                family.labels(device).set(readings[name])
            else:
                family.clear()
