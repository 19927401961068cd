"""Metrics of a leader and of a frontend after reported events, as scraped by Prometheus."""

from collections import Counter as Tally
from collections.abc import Sequence

from multiworld_serving.common.service.snapshots import ReplicaState
from multiworld_serving.server.frontend.observability.metrics import FrontendMetrics
from multiworld_serving.server.frontend.observability.request_records import RequestRecord
from multiworld_serving.server.leader.metrics import LeaderMetrics, PipelineCollector
from multiworld_serving.server.leader.scheduling.state import Counters
from tests.unit.server.pipelines import pipeline


def leader_metrics(*stages: Sequence[ReplicaState], counters: Counters | None = None) -> LeaderMetrics:
    """The metrics of a leader with these replicas."""
    metrics, now = LeaderMetrics(), pipeline(*stages)
    metrics.derived.register(PipelineCollector(lambda: now, counters or Counters()))
    return metrics


def busy_leader() -> LeaderMetrics:
    """The metrics of a leader to which everything has happened that adds series."""
    metrics = leader_metrics(("ready", "broken"))
    metrics.link(0, 1)
    metrics.world_broken(0, 1, "exit", 0.02)
    metrics.replicas_wanted.labels(0).set(1.5)
    return metrics


def busy_frontend() -> FrontendMetrics:
    """The metrics of a frontend to which everything has happened that adds series."""
    metrics = FrontendMetrics()
    counts = metrics.requests.of_model("m")
    counts.declare("m", "v", ("predict",))
    metrics.requests.end({}, RequestRecord("id", "v", "predict", counts, status=200))
    counts.set_share("shadow")
    metrics.group_state("m", 1, 1, "ready")
    metrics.declare_generation("m")
    return metrics


def test_pipeline_is_derived_from_its_snapshot() -> None:
    counters = Counters(hedges=Tally(won=2), reroutes=Tally({1: 1}))
    metrics = leader_metrics(("ready", "joining"), ("ready",), counters=counters)
    value = metrics.derived.get_sample_value
    assert (value("multiworld_queue_depth"), value("multiworld_redundancy")) == (3, 0)
    assert value("multiworld_hedges_total", {"outcome": "won"}) == 2
    assert value("multiworld_hedges_total", {"outcome": "lost"}) == 0
    assert value("multiworld_stage_replicas", {"stage": "0", "state": "joining"}) == 1
    assert value("multiworld_stage_replicas", {"stage": "0", "state": "broken"}) == 0
    assert [value("multiworld_reroutes_total", {"stage": stage}) for stage in "01"] == [0, 1]
    for replica, up in (("0", 1), ("1", 0)):
        slot = {"stage": "0", "replica": replica}
        assert value("multiworld_world_up", {"world": f"s0.r{replica}", **slot}) == up
        assert value("multiworld_replica_in_flight", slot) == 2
    assert value("multiworld_stage_info", {"stage": "1", "stage_name": "stem"}) == 1
    assert value("multiworld_world_worker", {"world": "s0.r1", "worker": "local-1", "host": "h"}) == 1


def test_failures_of_a_slot_start_at_zero_and_add_no_series() -> None:
    metrics = busy_leader()
    failures = {"stage": "0", "replica": "2", "cause": "hang"}
    metrics.link(0, 2)
    before = metrics.text().count(b"\nmultiworld_")
    assert metrics.registry.get_sample_value("multiworld_world_failures_total", failures) == 0
    for _ in range(1000):
        metrics.link(0, 2)
        metrics.world_broken(0, 2, "hang", 0.02)
    assert metrics.registry.get_sample_value("multiworld_world_failures_total", failures) == 1000
    assert metrics.text().count(b"\nmultiworld_") == before
