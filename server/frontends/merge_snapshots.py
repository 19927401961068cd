"""The pipeline's snapshot from the states of several leaders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from multiworld_serving.server.frontends.messages import LeaderState
from multiworld_serving.server.snapshots import LeaderSnapshot, PipelineSnapshot, StageSnapshot


def snapshot_without_leaders(
    last: PipelineSnapshot | None, leaders: tuple[LeaderSnapshot, ...], in_flight: int
) -> PipelineSnapshot:
    """The last snapshot, without workers and frontends, while no leader is connected."""
    last = last or PipelineSnapshot("", "", False, False, 0.0, 0, 0, ())
    stages = tuple(
        replace(stage, replicas=tuple(replace(each, state="absent", worker=None) for each in stage.replicas))
        for stage in last.stages
    )
    return replace(
        last,
        ready=False,
        stages=stages,
        spares=(),
        frontends=(),
        edges=(),
        version_loading=None,
        rollout=None,
        leaders=leaders,
        requests_in_flight=in_flight,
    )


def merged_snapshot(
    best: LeaderState,
    states: Sequence[LeaderState],
    leaders: tuple[LeaderSnapshot, ...],
    *,
    ready: bool,
    stopping: bool,
) -> PipelineSnapshot:
    """The pipeline as the leader of `best` sees it, with the sums of all leaders and all frontends.

    Args:
        ready, stopping: of this frontend.
    """
    frontends = {frontend.name: frontend for state in states for frontend in state.snapshot.frontends}
    edges = {(edge.consumer, edge.producer): edge for state in (*states, best) for edge in state.snapshot.edges}
    loading = next((state for state in states if state.snapshot.rollout is not None), best)
    rollout = loading.snapshot.rollout and replace(loading.snapshot.rollout, leader=loading.leader)
    rerouted: Counter[int] = Counter()
    in_flight: Counter[tuple[int, str | None]] = Counter()
    batches_done: Counter[tuple[int, str | None]] = Counter()
    for state in states:
        for stage in state.snapshot.stages:
            rerouted[stage.index] += stage.rerouted
            for replica in stage.replicas:
                in_flight[stage.index, replica.worker] += replica.in_flight
                batches_done[stage.index, replica.worker] += replica.batches_done

    def with_sums(stage: StageSnapshot) -> StageSnapshot:
        replicas = (
            replace(
                replica,
                in_flight=in_flight[stage.index, replica.worker],
                batches_done=batches_done[stage.index, replica.worker],
            )
            for replica in stage.replicas
        )
        return replace(stage, replicas=tuple(replicas), rerouted=rerouted[stage.index])

    return replace(
        best.snapshot,
        stages=tuple(map(with_sums, best.snapshot.stages)),
        ready=ready,
        draining=stopping or best.snapshot.draining,
        queue_depth=sum(state.snapshot.queue_depth for state in states),
        requests_in_flight=sum(state.snapshot.requests_in_flight for state in states),
        leaders=leaders,
        version_loading=loading.snapshot.version_loading,
        rollout=rollout,
        frontends=tuple(frontends[name] for name in sorted(frontends)),
        edges=tuple(edges[pair] for pair in sorted(edges)),
    )
