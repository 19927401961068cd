"""What leaders report of their pipelines."""

from collections.abc import Iterable
from typing import Any

from multiworld_serving.common.service.snapshots import PipelineSnapshot, ReplicaSnapshot, ReplicaState, StageSnapshot


def pipeline(
    *stages: Iterable[ReplicaState | ReplicaSnapshot],
    model: str = "m",
    version: str = "v",
    ready: bool = True,
    draining: bool = False,
    **fields: Any,
) -> PipelineSnapshot:
    """A pipeline of these replicas, each given by its state or as it is."""
    made = [
        StageSnapshot(index, ("stem",), tuple(_replica(index, slot, each) for slot, each in enumerate(replicas)))
        for index, replicas in enumerate(stages)
    ]
    return PipelineSnapshot(model, version, ready, draining, 1.5, 3, 4, tuple(made), **fields)


def _replica(stage: int, slot: int, given: ReplicaState | ReplicaSnapshot) -> ReplicaSnapshot:
    if isinstance(given, ReplicaSnapshot):
        return given
    return ReplicaSnapshot(slot, given, f"s{stage}.r{slot}", 1, f"local-{slot}", host="h", in_flight=2)
