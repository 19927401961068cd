"""One record of the outcomes of requests: for Prometheus, the status page and the Open Inference Protocol."""

from __future__ import annotations

import pytest
import torch

from multiworld_serving.server.observability.frontend_metrics import FrontendMetrics
from multiworld_serving.server.observability.request_outcomes import MAX_VERSIONS
from multiworld_serving.server.observability.request_record import Inference, RequestRecord
from multiworld_serving.server.predictor import Prediction


def image(batch_size: int = 4, compute_s: float = 2.0) -> Prediction:
    return Prediction(torch.zeros(3), "m", "v", 0.5, compute_s, 0.1, 1, (), batch_size)


def record(
    *images: Prediction, version: str = "v", code: int = 200, duration_s: float = 1.0, input_s: float = 0.0
) -> RequestRecord:
    made = RequestRecord("id", version, protocol="v2", status=code, duration_s=duration_s)
    made.reason = "ok" if code == 200 else "deadline"
    made.inference = Inference(images, input_s, 0.5) if images else None
    return made


@pytest.fixture
def metrics() -> FrontendMetrics:
    made = FrontendMetrics()
    made.requests.declare("m", "v", ("v2",), {"ok": 200, "deadline": 504})
    return made


def test_outcomes_are_zero_before_the_first_request_of_a_version(metrics: FrontendMetrics) -> None:
    value = metrics.derived.get_sample_value
    labels = {"model": "m", "protocol": "v2", "code": "504", "reason": "deadline"}
    assert value("multiworld_requests_total", {**labels, "version": "v"}) == 0
    metrics.requests.ended(record(version="v1"))
    assert value("multiworld_requests_total", {**labels, "version": "v1"}) == 0


def test_requests_in_flight_images_and_durations_are_counted(metrics: FrontendMetrics) -> None:
    value = metrics.derived.get_sample_value
    for _ in range(4):
        metrics.requests.started()
    metrics.requests.ended(record(image(), image(), image(), duration_s=0.22))
    metrics.requests.ended(record(image(), image(), duration_s=0.22))
    metrics.requests.ended(record(code=504))
    assert value("multiworld_requests_in_flight") == 1
    assert value("multiworld_images_total", {"model": "m", "version": "v"}) == 5
    bucket = {"model": "m", "protocol": "v2", "code": "200", "le": "0.25"}
    of_duration = metrics.registry.get_sample_value
    assert of_duration("multiworld_request_duration_seconds_bucket", bucket) == 2
    assert of_duration("multiworld_request_duration_seconds_bucket", {**bucket, "le": "0.2"}) == 0
    assert metrics.requests.take_durations() == [0.22, 0.22]
    assert metrics.requests.take_durations() == []


def test_series_of_dropped_versions_are_removed_and_their_counts_remain(metrics: FrontendMetrics) -> None:
    for number in range(MAX_VERSIONS + 2):
        metrics.requests.ended(record(image(), version=f"v{number}"))
        metrics.requests.ended(record(version="v1", code=504))  # stays, because it is used
    lines = metrics.text().decode().splitlines()
    exported = {"v1", *(f"v{number}" for number in range(3, MAX_VERSIONS + 2))}
    for family in ("multiworld_requests_total", "multiworld_images_total"):
        found = {line.split('version="')[1].split('"')[0] for line in lines if line.startswith(family + "{")}
        assert found == exported, family
    assert metrics.requests.statuses() == {"2": MAX_VERSIONS + 2, "5": MAX_VERSIONS + 2}
    assert metrics.requests.statistics("1")["inference_count"] == MAX_VERSIONS + 2


def test_statistics_count_a_batch_once_for_all_its_requests(metrics: FrontendMetrics) -> None:
    for _ in range(3):
        metrics.requests.ended(record(image()))
    metrics.requests.ended(record(image(), image(1, 7.0), input_s=0.25))
    metrics.requests.ended(record(code=504))
    metrics.requests.ended(record(code=404))  # not for the model
    found = metrics.requests.statistics("1")
    assert (found["inference_count"], found["execution_count"]) == (5, 2)
    assert [(batch["batch_size"], batch["compute_infer"]) for batch in found["batch_stats"]] == [
        (1, {"count": 1, "ns": 7_000_000_000}),
        (4, {"count": 1, "ns": 2_000_000_000}),
    ]
    # Three answers of half a second each belong to the batch of four, and half of the one that two images share.
    assert [batch["compute_output"] for batch in found["batch_stats"]] == [
        {"count": 1, "ns": 250_000_000},
        {"count": 4, "ns": 1_750_000_000},
    ]
    phases = found["inference_stats"]
    assert phases["success"] == {"count": 4, "ns": 4_000_000_000}
    assert phases["fail"] == {"count": 1, "ns": 1_000_000_000}
    assert phases["compute_infer"] == {"count": 4, "ns": 13_000_000_000}
    assert phases["compute_input"]["ns"] == pytest.approx(650_000_000)
