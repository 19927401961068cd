"""Metrics after reported events, as scraped by Prometheus."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from multiworld_serving.server.observability.metrics import Metrics
from multiworld_serving.server.predictor import ModelVersion
from multiworld_serving.server.snapshots import ReplicaSnapshot, ReplicaState, StageSnapshot

NAMES = {
    "multiworld_requests_total": ("counter", {"model", "version", "protocol", "code", "reason"}),
    "multiworld_request_duration_seconds": ("histogram", {"model", "protocol", "code"}),
    "multiworld_images_total": ("counter", {"model", "version"}),
    "multiworld_http_connections": ("gauge", set()),
    "multiworld_requests_in_flight": ("gauge", set()),
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
    "multiworld_service_state": ("gauge", {"state"}),
    "multiworld_leaders": ("gauge", set()),
    "multiworld_leaders_configured": ("gauge", set()),
    "multiworld_requests_resubmitted_total": ("counter", {"reason"}),
    "multiworld_model_version": ("gauge", {"model", "version", "number"}),
    "multiworld_version_changes_total": ("counter", set()),
    "multiworld_build_info": ("gauge", {"version"}),
}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics({"version": "0.1.0"})


def stage(index: int, *states: ReplicaState) -> StageSnapshot:
    return StageSnapshot(index, ("stem",), tuple(ReplicaSnapshot(slot, state) for slot, state in enumerate(states)))


def tell_everything(metrics: Metrics) -> None:
    metrics.version_serves("m", ModelVersion(1, "v"))
    metrics.request_started()
    metrics.request_finished(
        model="m", version="v", protocol="predict", code=200, reason="ok", duration_s=0.01, images=1
    )
    metrics.queue_depth(3)
    metrics.queued(0.001)
    metrics.batch_formed(8)
    metrics.batch_sent(0, 1, 3 * 224 * 224)
    metrics.batch_answered(0, 1, compute_s=0.01, transfer_s=0.002, payload_bytes=4000)
    metrics.batch_sent(0, 1, 100)
    metrics.batch_failed(0, 1)
    metrics.world_worker("stage0-1", "w", "h")
    metrics.world_ready("stage0-1", 0, 1)
    metrics.world_broken("stage0-1", 0, 1, cause="exit", detected_after_s=0.02)
    metrics.world_recovered(cause="exit", seconds=1.4)
    metrics.rerouted(0, 0.003)
    metrics.retried(0)
    metrics.hedged("won")
    metrics.request_lost()
    metrics.duplicate_answer()
    metrics.replica_states([stage(0, "ready", "ready")])
    metrics.replicas_wanted((1.5,))
    metrics.frontends(2)
    metrics.leaders(1, 2)
    metrics.service_state("ready")
    metrics.resubmitted("failed")


def test_every_documented_name_is_exposed_with_its_labels(metrics: Metrics) -> None:
    tell_everything(metrics)
    text, _ = metrics.exposition()
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        if family.name.startswith("multiworld_"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            found[name] = (family.type, labels)
    assert found == NAMES


OPEN = "application/openmetrics-text"


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4"),
        ("*/*", "text/plain; version=0.0.4"),
        (OPEN, f"{OPEN}; version=1.0.0"),
        (f"{OPEN}; version=1.0.0", f"{OPEN}; version=1.0.0"),
        (f"{OPEN};version=0.0.1", "text/plain; version=0.0.4"),
        (f"{OPEN}; version=abc", "text/plain; version=0.0.4"),
        (f"{OPEN}; version=1.a.0", "text/plain; version=0.0.4"),
        (f"{OPEN}; version=9.0.0", "text/plain; version=0.0.4"),
        (f"{OPEN}; version={'9' * 5000}", "text/plain; version=0.0.4"),
        (f"{OPEN}; VERSION=abc, {OPEN}; version=1.0.0", f"{OPEN}; version=1.0.0"),
        (f'{OPEN}; version="1.0.0"', "text/plain; version=0.0.4"),
        (f"{OPEN}; version=1.0.0\x85", "text/plain; version=0.0.4"),
        ("text/plain; version=abc", "text/plain; version=0.0.4"),
        ("text/plain; version=1.0.0; escaping=nonsense", "text/plain; version=1.0.0"),
    ],
)
def test_scrape_uses_a_supported_format_when_the_requested_one_is_not(
    metrics: Metrics, accept: str, content_type: str
) -> None:
    text, found = metrics.exposition(accept)
    assert found.startswith(content_type)
    assert text.endswith(b"# EOF\n") == found.startswith(OPEN)


def test_world_up_follows_the_world_and_failure_counts_remain(metrics: Metrics) -> None:
    value = metrics.registry.get_sample_value
    labels = {"world": "stage0-1", "stage": "0", "replica": "1"}
    failures = {"stage": "0", "replica": "1", "cause": "hang"}
    metrics.world_ready("stage0-1", 0, 1)
    assert value("multiworld_world_up", labels) == 1
    assert value("multiworld_world_failures_total", failures) == 0
    metrics.world_broken("stage0-1", 0, 1, cause="hang", detected_after_s=1.02)
    assert value("multiworld_world_up", labels) == 0
    metrics.world_ready("stage0-1", 0, 1)
    metrics.world_closed("stage0-1", 0, 1)
    assert value("multiworld_world_up", labels) == 0
    assert value("multiworld_world_failures_total", failures) == 1
    assert value("multiworld_failure_detection_seconds_count", {"cause": "hang"}) == 1


def test_world_names_its_worker_and_no_former_one(metrics: Metrics) -> None:
    metrics.world_worker("s0.r0", "vm-11", "vm")
    metrics.world_worker("s0.r1", "vm-12", "vm")
    metrics.world_worker("s0.r0", "other-13", "other")
    text = metrics.exposition()[0].decode()
    assert {line for line in text.splitlines() if line.startswith("multiworld_world_worker{")} == {
        'multiworld_world_worker{world="s0.r0",worker="other-13",host="other"} 1',
        'multiworld_world_worker{world="s0.r1",worker="vm-12",host="vm"} 1',
    }


def test_images_are_counted_by_version_until_it_is_dropped(metrics: Metrics) -> None:
    outcome: dict[str, Any] = {"model": "m", "protocol": "v2", "code": 200, "reason": "ok", "duration_s": 0.22}
    metrics.request_finished(**outcome, version="v", images=3)
    metrics.request_finished(**outcome, version="v", images=2)
    metrics.request_finished(**{**outcome, "code": 504}, version="v")
    value = metrics.registry.get_sample_value
    assert value("multiworld_images_total", {"model": "m", "version": "v"}) == 5
    bucket = {"model": "m", "protocol": "v2", "code": "200", "le": "0.25"}
    assert value("multiworld_request_duration_seconds_bucket", bucket) == 2
    assert value("multiworld_request_duration_seconds_bucket", {**bucket, "le": "0.2"}) == 0
    metrics.version_retired("m", ModelVersion(1, "v"))
    assert value("multiworld_images_total", {"model": "m", "version": "v"}) is None


def test_no_series_is_added_when_a_slot_fails_ten_thousand_times(metrics: Metrics) -> None:
    tell_everything(metrics)
    before = metrics.exposition()[0].count(b"\nmultiworld_")
    for _ in range(10_000):
        metrics.world_ready("stage0-1", 0, 1)
        metrics.world_broken("stage0-1", 0, 1, cause="exit", detected_after_s=0.02)
        metrics.resubmitted("failed")
    assert metrics.exposition()[0].count(b"\nmultiworld_") == before


@pytest.mark.parametrize(
    ("stages", "redundancy"),
    [
        ([stage(0, "ready", "ready"), stage(1, "ready", "ready", "ready")], 1),
        ([stage(0, "ready", "ready"), stage(1, "ready", "broken")], 0),
        ([stage(0, "ready", "ready"), stage(1, "joining")], -1),
        ([], -1),
    ],
)
def test_redundancy_is_the_fewest_ready_replicas_minus_one(
    metrics: Metrics, stages: list[StageSnapshot], redundancy: int
) -> None:
    metrics.replica_states(stages)
    assert metrics.registry.get_sample_value("multiworld_redundancy") == redundancy


def test_frontends_report_no_redundancy_and_leaders_no_leaders() -> None:
    metrics = Metrics()
    for name in ("multiworld_redundancy", "multiworld_leaders", "multiworld_leaders_configured"):
        assert metrics.registry.get_sample_value(name) is None


def test_replica_states_drop_to_zero_when_no_replica_is_in_them(metrics: Metrics) -> None:
    metrics.replica_states([stage(0, "joining", "ready")])
    metrics.replica_states([stage(0, "ready", "ready")])
    value = metrics.registry.get_sample_value
    assert value("multiworld_stage_replicas", {"stage": "0", "state": "joining"}) == 0
    assert value("multiworld_stage_replicas", {"stage": "0", "state": "ready"}) == 2


def test_bytes_and_batches_in_flight_are_counted_per_link(metrics: Metrics) -> None:
    value, link = metrics.registry.get_sample_value, {"stage": "0", "replica": "1"}
    metrics.world_ready("s0.r1", 0, 1)
    for _ in range(3):
        metrics.batch_sent(0, 1, 100)
    metrics.batch_answered(0, 1, compute_s=0.01, transfer_s=0.002, payload_bytes=7)
    metrics.batch_failed(0, 1)
    assert value("multiworld_link_bytes_total", link | {"direction": "sent"}) == 300
    assert value("multiworld_link_bytes_total", link | {"direction": "received"}) == 7
    assert value("multiworld_replica_in_flight", link) == 1
    metrics.world_broken("s0.r1", 0, 1, cause="exit")
    assert value("multiworld_replica_in_flight", link) == 0


def test_outcomes_are_zero_before_the_first_request(metrics: Metrics) -> None:
    metrics.declare_outcomes("m", "v", ("predict",), {"ok": 200, "deadline": 504})
    labels = {"model": "m", "version": "v", "protocol": "predict", "code": "504", "reason": "deadline"}
    assert metrics.registry.get_sample_value("multiworld_requests_total", labels) == 0
    metrics.request_started()
    metrics.request_finished(model="m", version="v", protocol="predict", code=504, reason="deadline", duration_s=30)
    assert metrics.registry.get_sample_value("multiworld_requests_total", labels) == 1


def test_two_leaders_in_one_process_do_not_share_series() -> None:
    first, second = Metrics(), Metrics()
    first.request_lost()
    assert second.registry.get_sample_value("multiworld_requests_lost_total") == 0


def test_series_of_a_retired_version_are_removed_and_totals_remain() -> None:
    metrics = Metrics()
    metrics.declare_outcomes("m", "v1", ("predict", "v2"), {"ok": 200, "internal": 500})
    metrics.version_serves("m", ModelVersion(1, "v1"))
    for version in ("v1", "v2"):
        metrics.request_started()
        metrics.request_finished(model="m", version=version, protocol="predict", code=200, reason="ok", duration_s=0.01)
    metrics.version_serves("m", ModelVersion(2, "v2"))
    before = metrics.totals()
    metrics.version_retired("m", ModelVersion(1, "v1"))
    text, _ = metrics.exposition()
    assert b'version="v1"' not in text
    assert b'version="v2"' in text
    assert metrics.totals() == before
    assert before.answered == 2


def test_series_stay_bounded_when_versions_change() -> None:
    metrics, sizes = Metrics(), []
    metrics.declare_outcomes("m", "v0", ("predict",), {"ok": 200})
    for number in range(30):
        metrics.version_serves("m", ModelVersion(number, f"v{number}"))
        metrics.version_retired("m", ModelVersion(number - 2, f"v{number - 2}"))
        sizes.append((len(metrics._requests._series), len(metrics._requests._by_given)))
    assert sizes[-1] == sizes[5]
