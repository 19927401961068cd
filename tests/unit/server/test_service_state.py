"""The state of the service and its reasons."""

import pytest

from multiworld_serving.common.service.snapshots import (
    FailureSnapshot,
    LeaderSnapshot,
    PipelineSnapshot,
    ReplicaSnapshot,
    ReplicaState,
    ServiceState,
)
from tests.unit.server.pipelines import pipeline

UP: tuple[ReplicaState, ...] = ("ready", "ready")
REFUSED = ReplicaSnapshot(
    0, "broken", last_failure=FailureSnapshot("error", "local-0 cannot serve stage 0: index out of range", 0.0)
)
HERE, GONE = LeaderSnapshot("a:1", "ready", "leader-0"), LeaderSnapshot("b:1", "unreachable")


@pytest.mark.parametrize(
    ("snapshot", "state", "reason"),
    [
        (pipeline(("ready",), ("ready",)), "ready", ""),
        (pipeline(UP, ("ready", "ready", "broken")), "ready", ""),
        (pipeline(UP, ("ready", "broken")), "degraded", "stage 1 has 1 of 2 replicas"),
        (pipeline(UP, leaders=(HERE, GONE)), "degraded", "leader b:1 is unreachable"),
        (
            pipeline(UP, ("broken", "loading"), ready=False),
            "not_ready",
            "stage 1 has no ready replica (broken, loading)",
        ),
        (
            pipeline((REFUSED,), ready=False),
            "not_ready",
            "stage 0 has no ready replica (broken): local-0 cannot serve stage 0: index out of range",
        ),
        (pipeline(ready=False), "not_ready", "the pipeline is not complete"),
        (pipeline(UP, ready=False, unloaded=True), "unloaded", "an administrator has unloaded the model"),
        (pipeline(UP, ready=False, draining=True), "draining", "the server is stopping"),
    ],
)
def test_state_follows_from_replicas_and_leaders(snapshot: PipelineSnapshot, state: ServiceState, reason: str) -> None:
    assert (snapshot.state, snapshot.reasons) == (state, (reason,) if reason else ())


def test_pipeline_has_failed_when_all_replicas_of_a_stage_have_reported_errors() -> None:
    def failure(*replicas: ReplicaSnapshot) -> str:
        return pipeline(replicas, ready=False).failure

    assert "index out of range" in failure(REFUSED, REFUSED)
    lost = ReplicaSnapshot(1, "broken", last_failure=FailureSnapshot("exit", "it has ended", 0.0))
    for other in (ReplicaSnapshot(1, "loading"), ReplicaSnapshot(1, "ready"), lost):
        assert not failure(REFUSED, other)
    assert not failure()
