"""Metrics of a leader and of a frontend after reported events, as scraped by Prometheus."""

from __future__ import annotations

from collections import Counter as Tally

import pytest
from prometheus_client.parser import text_string_to_metric_families

from multiworld_serving.common.metrics import ProgramMetrics
from multiworld_serving.server.observability.frontend_metrics import FrontendMetrics
from multiworld_serving.server.observability.leader_metrics import LeaderMetrics, PipelineCollector
from multiworld_serving.server.observability.requests import RequestRecord
from multiworld_serving.server.scheduling.state import Counters
from multiworld_serving.server.snapshots import PipelineSnapshot, ReplicaSnapshot, ReplicaState, StageSnapshot

OF_LEADERS = {
    "multiworld_queue_depth": ("gauge", set()),
    "multiworld_queue_limit": ("gauge", set()),
    "multiworld_queue_duration_seconds": ("histogram", set()),
    "multiworld_batch_size": ("histogram", set()),
    "multiworld_stage_duration_seconds": ("histogram", {"stage", "replica", "phase"}),
    "multiworld_inputs_lost_total": ("counter", set()),
    "multiworld_relayed_bytes_total": ("counter", {"sender"}),
    "multiworld_link_bytes_total": ("counter", {"stage", "replica", "direction"}),
    "multiworld_replica_in_flight": ("gauge", {"stage", "replica"}),
    "multiworld_spares": ("gauge", set()),
    "multiworld_workers_quarantined": ("gauge", set()),
    "multiworld_world_up": ("gauge", {"world", "stage", "replica"}),
    "multiworld_world_worker": ("gauge", {"world", "worker", "host"}),
    "multiworld_world_failures_total": ("counter", {"stage", "replica", "cause"}),
    "multiworld_failure_detection_seconds": ("histogram", {"cause"}),
    "multiworld_reroute_seconds": ("histogram", set()),
    "multiworld_recovery_seconds": ("histogram", {"cause"}),
    "multiworld_reroutes_total": ("counter", {"stage"}),
    "multiworld_retries_total": ("counter", {"stage"}),
    "multiworld_hedges_total": ("counter", {"outcome"}),
    "multiworld_requests_lost_total": ("counter", set()),
    "multiworld_duplicate_answers_total": ("counter", set()),
    "multiworld_stage_replicas": ("gauge", {"stage", "state"}),
    "multiworld_redundancy": ("gauge", set()),
    "multiworld_replicas_wanted": ("gauge", {"stage"}),
    "multiworld_frontends": ("gauge", set()),
    "multiworld_model_version": ("gauge", {"model", "version", "number"}),
    "multiworld_version_changes_total": ("counter", set()),
    "multiworld_build_info": ("gauge", {"version", "torch", "python"}),
}
OF_FRONTENDS = {
    "multiworld_requests_total": ("counter", {"model", "version", "protocol", "code", "reason"}),
    "multiworld_request_duration_seconds": ("histogram", {"model", "protocol", "code"}),
    "multiworld_images_total": ("counter", {"model", "version"}),
    "multiworld_requests_in_flight": ("gauge", set()),
    "multiworld_http_connections": ("gauge", set()),
    "multiworld_service_state": ("gauge", {"model", "state"}),
    "multiworld_leaders": ("gauge", {"model"}),
    "multiworld_leaders_configured": ("gauge", {"model"}),
    "multiworld_requests_resubmitted_total": ("counter", {"model", "reason"}),
    "multiworld_build_info": ("gauge", {"version", "torch", "python"}),
}


def stage(index: int, *states: ReplicaState) -> StageSnapshot:
    replicas = (
        ReplicaSnapshot(slot, state, f"w{slot}", worker=f"worker-{slot}", host="h", in_flight=2)
        for slot, state in enumerate(states)
    )
    return StageSnapshot(index, ("stem",), tuple(replicas))


def leader_metrics(*stages: StageSnapshot, counters: Counters | None = None) -> LeaderMetrics:
    """The metrics of a leader with these stages."""
    metrics = LeaderMetrics()
    now = PipelineSnapshot("m", "v", True, False, 1.0, 3, 4, stages)
    metrics.derived.register(PipelineCollector(lambda: now, counters or Counters()))
    return metrics


def busy_leader() -> LeaderMetrics:
    """The metrics of a leader to which everything has happened that adds series."""
    metrics = leader_metrics(stage(0, "ready", "broken"))
    metrics.link(0, 1)
    metrics.world_broken(0, 1, "exit", 0.02)
    metrics.replicas_wanted.labels(0).set(1.5)
    return metrics


def busy_frontend() -> FrontendMetrics:
    """The metrics of a frontend to which everything has happened that adds series."""
    metrics = FrontendMetrics()
    counts = metrics.requests.of_model("m")
    counts.declare("v", ("predict",))
    metrics.requests.end({}, RequestRecord("id", "v", "predict", counts, status=200))
    metrics.group_state("m", 1, 1, "ready")
    return metrics


@pytest.mark.parametrize(("metrics", "names"), [(busy_leader(), OF_LEADERS), (busy_frontend(), OF_FRONTENDS)])
def test_every_documented_name_is_exposed_with_its_labels(
    metrics: ProgramMetrics, names: dict[str, tuple[str, set[str]]]
) -> None:
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        if family.name.startswith("multiworld_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            found[name] = (family.type, labels)
    assert found == names


def test_pipeline_is_derived_from_its_snapshot() -> None:
    counters = Counters(hedges=Tally(won=2), reroutes=Tally({1: 1}))
    metrics = leader_metrics(stage(0, "ready", "joining"), stage(1, "ready"), counters=counters)
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
    assert value("multiworld_world_worker", {"world": "s0.r1", "worker": "worker-1", "host": "h"}) == 1


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
